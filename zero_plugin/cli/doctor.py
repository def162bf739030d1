"""`zero-plugin doctor`: find what this machine lacks for a config, and the fixes. `zero-plugin env`: print facts."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Final

import typer

import zero_plugin
from zero_plugin.cli import doctor_machine, doctor_software
from zero_plugin.cli.output import Finding, print_findings, print_json, print_line
from zero_plugin.config.amounts import show_bytes
from zero_plugin.config.document import Document
from zero_plugin.config.find import find_config_file
from zero_plugin.config.installed import TESTED, installed_version
from zero_plugin.config.keys import LaunchSettings
from zero_plugin.config.launch_settings import asks_for_cpu, asks_for_tpu, launch_settings
from zero_plugin.errors import ConfigError
from zero_plugin.launch.build import build_spec
from zero_plugin.launch.flags import document_from_flags
from zero_plugin.launch.spec import Program
from zero_plugin.machine.hardware import (
    Machine,
    available_cpu_memory,
    count_cores,
    has_gpu_driver,
    lockable_bytes,
    look_at_disk,
    read_nodes,
    total_cpu_memory,
)
from zero_plugin.machine.op_builds import build_folder, find_stale_build_locks, missing_builds
from zero_plugin.machine.xla_runtime import PJRT_DEVICE, find_tpu

_SHARED: Final = Path("/dev/shm")  # noqa: S108 - not a file of ours
_PACKAGES = ("torch", "torch_xla", "deepspeed", "transformers", "accelerate", "peft", "safetensors", "numpy")


def doctor(
    config_file: Annotated[
        str | None,
        typer.Option(
            "--config_file", "--config", metavar="PATH", help="YAML launch config or DeepSpeed JSON; default: launch's."
        ),
    ] = None,
    build: Annotated[
        bool, typer.Option(help="Build the C++ ops that the config needs; each takes up to a minute or two.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this machine for a config: versions, compilers, op builds, memory, disks, names and ports.

    Each problem is printed with the command or the edit that fixes it. Exit code: 1 if something that the config needs
    is missing or wrong.
    """
    document = document_from_flags({} if config_file is None else {"config_file": config_file})
    findings = list(examine(document, os.environ, build=build))
    healthy = all(finding.level != "wrong" for finding in findings)
    if as_json:
        print_json({"healthy": healthy, "files": document.sources, "findings": [asdict(f) for f in findings]})
    else:
        print_findings(findings)
    raise typer.Exit(0 if healthy else 1)


def examine(document: Document, environ: Mapping[str, str], *, build: bool = False) -> Iterator[Finding]:
    """Yield the finding of each check. Takes about a second, and one more for each NVMe folder.

    Args:
        document: checked.
        environ: this process's environment.
        build: whether to build the ops that the configuration needs, which may take minutes.
    """
    settings = launch_settings(document)
    names = [gpu.name for gpu in _gpus()]
    tpu = find_tpu(environ)
    needs = doctor_machine.find_needs(document, settings, len(names))
    try:
        required = metadata.requires("zero-plugin") or []
    except metadata.PackageNotFoundError:  # run from a folder without installation
        required = []
    yield doctor_software.check_python(sys.version_info[:2])
    installed = {name: installed_version(name) for name in TESTED}
    yield from doctor_software.check_packages(installed, required, deepspeed=needs.deepspeed)
    yield _launch(document, Machine(len(names), count_cores(), tpu), environ)
    cuda = doctor_software.installed_cuda()
    folder = build_folder(environ, cuda)
    stale = find_stale_build_locks(needs.ops, folder)
    yield doctor_software.check_compiler(environ, missing_builds(needs.ops, folder))
    yield doctor_software.check_ninja(environ, needs.ops)
    nvcc, home = doctor_software.nvcc_version(environ) if cuda else (None, "")
    yield doctor_software.check_cuda(cuda, nvcc, home, needs.cuda_ops)
    yield doctor_software.check_libaio(environ, needed=bool(needs.nvme_folders))
    yield doctor_software.check_locks(stale)
    of_build = {**environ, **({} if needs.on_gpu else {"DS_ACCELERATOR": "cpu"})}
    config = document.sources[0] if document.sources else ""
    yield from doctor_software.check_builds(needs.ops, folder, of_build, build=build and not stale, config=config)
    on_tpu = bool(asks_for_tpu(settings))
    if not on_tpu:
        driver, requested = has_gpu_driver(), _requested_gpus(settings)
        yield doctor_machine.check_gpus(names, environ, driver=driver, torch_cuda=cuda is not None, requested=requested)
    yield doctor_machine.check_tpu(tpu, environ, requested=on_tpu)
    yield doctor_machine.check_host_memory(total_cpu_memory(), available_cpu_memory(), needs)
    yield doctor_machine.check_locked_memory(lockable_bytes(), needs)
    size, _, free = shutil.disk_usage(_SHARED) if _SHARED.is_dir() else (None, 0, 0)
    yield doctor_machine.check_shared_memory(size, free, needs)
    yield doctor_machine.check_nodes(read_nodes(), needs)
    for name in needs.nvme_folders:
        yield from doctor_machine.check_disk(name, look_at_disk(Path(name)))
    yield from doctor_machine.check_folders(environ)
    yield doctor_machine.check_hostname(socket.gethostname(), machines=settings.num_machines)
    yield doctor_machine.check_port(settings.main_process_port)


def _launch(document: Document, machine: Machine, environ: Mapping[str, str]) -> Finding:
    """Find what `launch` would refuse, except the port, which has a check of its own."""
    document = replace(document, launch=document.launch.without("main_process_port"))
    program = Program(str(Path(__file__)), kind="module")  # a placeholder: no file is looked up for a module
    name = ", ".join(document.sources) or "no file: the defaults"
    try:
        build_spec(document, program, machine, environ)
    except ConfigError as error:
        found = "; ".join(problem.headline for problem in error.problems)
        return Finding("config", "wrong", found, "\n".join(problem.fix for problem in error.problems))
    return Finding("config", "ok", name)


def _requested_gpus(settings: LaunchSettings) -> str:
    if asks_for_cpu(settings):
        return ""
    if settings.distributed_type == "MULTI_GPU":
        return "distributed_type is MULTI_GPU"
    return "" if settings.gpu_ids == "all" else f"gpu_ids is {settings.gpu_ids}"


def env() -> None:
    """Print the facts for a bug report: versions, devices and the default config of `launch`."""
    file = find_config_file(os.environ)
    for name, value in (*_facts(), ("config", file or "none")):
        print_line(f"{name:<13} {value}")
    if file is not None and file.is_file():
        for line in file.read_text(errors="replace").splitlines():
            print_line(f"    {line}")


def _facts() -> Iterator[tuple[str, str]]:
    yield "zero_plugin", zero_plugin.__version__
    for package in _PACKAGES:
        yield package, installed_version(package) or "not installed"
    yield "python", platform.python_version()
    yield "system", platform.platform()
    yield "cores", str(count_cores())
    yield "CPU memory", show_bytes(total_cpu_memory())
    yield "GPUs", ", ".join(f"{gpu.name} ({show_bytes(gpu.total_memory)})" for gpu in _gpus()) or "none"
    chosen = os.environ.get(PJRT_DEVICE)
    yield "TPU", find_tpu(os.environ) or (f"{PJRT_DEVICE} is {chosen}" if chosen else "none")


def _gpus() -> list[Any]:
    """Return torch's properties of each GPU. torch is imported only if a GPU driver is loaded."""
    if not has_gpu_driver():
        return []
    try:
        import torch
    except ImportError:  # the check of packages reports it
        return []
    return [torch.cuda.get_device_properties(gpu) for gpu in range(torch.cuda.device_count())]
