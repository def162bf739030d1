"""Looks at this machine, for one configuration, and lists what was found."""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from zero_plugin.cli.doctor_checks.build_tools import (
    TESTED,
    check_builds,
    check_compiler,
    check_cuda,
    check_libaio,
    check_locks,
    check_ninja,
    check_packages,
    check_python,
    missing_builds,
    nvcc_version,
    torch_cuda,
)
from zero_plugin.cli.doctor_checks.finding import Finding, Needs, find_needs
from zero_plugin.cli.doctor_checks.memory_and_disks import (
    check_disk,
    check_host_memory,
    check_locked_memory,
    check_shared_memory,
)
from zero_plugin.cli.doctor_checks.places import (
    check_folders,
    check_gpus,
    check_hostname,
    check_nodes,
    check_port,
    check_tpu,
)
from zero_plugin.config.document import Document
from zero_plugin.config.launch_settings import LaunchSettings, asks_for_cpu, asks_for_tpu, launch_settings
from zero_plugin.config.resolve.facts import installed_version
from zero_plugin.errors import ConfigError
from zero_plugin.launch.build import build_spec
from zero_plugin.launch.spec import Program
from zero_plugin.machine.disks import look_at_disk
from zero_plugin.machine.hardware import Machine, count_cores, has_gpu_driver, read_nodes
from zero_plugin.machine.memory import available_cpu_memory, lockable_bytes, total_cpu_memory
from zero_plugin.machine.op_builds import build_folder, find_stale_build_locks
from zero_plugin.machine.xla_runtime import find_tpu

_SHARED: Final = Path("/dev/shm")  # noqa: S108 - not a file of ours


def examine(document: Document, environ: Mapping[str, str], *, build: bool = False) -> Iterator[Finding]:
    """Find what is well and what is not; takes about a second, and one more for each NVMe folder.

    torch is imported only where a GPU driver is loaded, to ask for the GPUs.

    Args:
        document: checked.
        environ: this process's environment.
        build: whether to build the ops that the configuration needs, which takes up to minutes.
    """
    settings = launch_settings(document)
    names = _gpu_names()
    tpu = find_tpu(environ)
    needs = find_needs(document, settings, len(names))
    yield from _software(needs)
    yield _launch(document, Machine(len(names), count_cores(), tpu), environ)
    cuda = torch_cuda(_torch_folder() / "version.py")
    folder = build_folder(environ, cuda)
    stale = find_stale_build_locks(needs.ops, folder)
    yield check_compiler(environ, missing_builds(needs.ops, folder))
    yield check_ninja(environ, needs.ops)
    nvcc, home = nvcc_version(environ) if cuda else (None, "")
    yield check_cuda(cuda, nvcc, home, needs.cuda_ops)
    yield check_libaio(environ, needed=bool(needs.nvme_folders))
    yield check_locks(stale)
    of_build = {**environ, **({} if needs.on_gpu else {"DS_ACCELERATOR": "cpu"})}
    config = document.sources[0] if document.sources else ""
    yield from check_builds(needs.ops, folder, of_build, build=build and not stale, config=config)
    on_tpu = bool(asks_for_tpu(settings))
    if not on_tpu:
        driver, asked = has_gpu_driver(), _gpus_asked(settings)
        yield check_gpus(names, environ, driver=driver, torch_cuda=cuda is not None, asked=asked)
    yield check_tpu(tpu, environ, asked=on_tpu)
    yield check_host_memory(total_cpu_memory(), available_cpu_memory(), needs)
    yield check_locked_memory(lockable_bytes(), needs)
    there = shutil.disk_usage(_SHARED) if _SHARED.is_dir() else None
    yield check_shared_memory(there and there.total, there.free if there else 0, needs)
    yield check_nodes(read_nodes(), needs)
    for name in needs.nvme_folders:
        yield from check_disk(name, look_at_disk(Path(name)))
    yield from check_folders(environ)
    yield check_hostname(socket.gethostname(), machines=settings.num_machines)
    yield check_port(settings.main_process_port)


def _software(needs: Needs) -> Iterator[Finding]:
    yield check_python(sys.version_info[:2])
    try:
        required = metadata.requires("zero-plugin") or []
    except metadata.PackageNotFoundError:  # run from a folder that was not installed
        required = []
    yield from check_packages({name: installed_version(name) for name in TESTED}, required, deepspeed=needs.deepspeed)


def _launch(document: Document, machine: Machine, environ: Mapping[str, str]) -> Finding:
    """What `launch` would refuse, but for the port, which has a line of its own."""
    document = replace(document, launch=document.launch.without("main_process_port"))
    program = Program(str(Path(__file__)), kind="module")  # any that no file has to be looked for
    name = ", ".join(document.sources) or "no file: the defaults"
    try:
        build_spec(document, program, machine, environ)
    except ConfigError as error:
        found = "; ".join(problem.headline for problem in error.problems)
        return Finding("config", "wrong", found, "\n".join(problem.fix for problem in error.problems))
    return Finding("config", "ok", name)


def _torch_folder() -> Path:
    spec = find_spec("torch")
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else Path()


def _gpu_names() -> list[str]:
    if not has_gpu_driver():
        return []
    try:
        import torch
    except ImportError:  # told as a package
        return []
    return [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())]


def _gpus_asked(settings: LaunchSettings) -> str:
    if asks_for_cpu(settings):
        return ""
    if settings.distributed_type == "MULTI_GPU":
        return "distributed_type is MULTI_GPU"
    return "" if settings.gpu_ids == "all" else f"gpu_ids is {settings.gpu_ids}"
