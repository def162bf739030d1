"""`zero-plugin doctor`: what is wrong with this machine for a config, and what fixes it. `zero-plugin env`: facts."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer

import zero_plugin
from zero_plugin.cli.doctor_checks.examine import examine
from zero_plugin.cli.output import print_findings
from zero_plugin.config.amounts import show_bytes
from zero_plugin.config.find import find_config_file
from zero_plugin.config.resolve.facts import installed_version
from zero_plugin.launch.flags import document_from_flags
from zero_plugin.machine.hardware import count_cores, has_gpu_driver
from zero_plugin.machine.memory import total_cpu_memory
from zero_plugin.machine.xla_runtime import PJRT_DEVICE, find_tpu

_PACKAGES = ("torch", "torch_xla", "deepspeed", "transformers", "accelerate", "peft", "safetensors", "numpy")


def doctor(
    config_file: Annotated[
        str | None,
        typer.Option(
            "--config_file",
            "--config",
            help="YAML launch config or DeepSpeed JSON; default: launch's.",
            show_default=False,
        ),
    ] = None,
    build: Annotated[
        bool, typer.Option("--build", help="Build the C++ ops that the config needs; each takes up to a minute or two.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look at this machine for what the config needs: versions, compilers, op builds, memory, disks, names and ports.

    Each line that is not well ends with the command or the edit that fixes it. Exit code: 1 where something that the
    config needs is wrong.
    """
    document = document_from_flags({} if config_file is None else {"config_file": config_file})
    findings = list(examine(document, os.environ, build=build))
    healthy = all(finding.level != "wrong" for finding in findings)
    if as_json:
        report = {"healthy": healthy, "files": list(document.sources), "findings": [asdict(f) for f in findings]}
        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        print_findings(findings)
    raise typer.Exit(0 if healthy else 1)


def env() -> None:
    """Print versions, devices and the config that `launch` takes when it is given none: what a bug report needs."""
    for name, value in _facts():
        print(f"{name:<13} {value}")
    file = find_config_file(os.environ)
    print(f"{'config':<13} {file or 'none'}")
    if file is not None and file.is_file():
        print("".join(f"    {line}\n" for line in file.read_text(errors="replace").splitlines()), end="")


def _facts() -> Iterator[tuple[str, str]]:
    yield "zero_plugin", zero_plugin.__version__
    for package in _PACKAGES:
        yield package, installed_version(package) or "not installed"
    yield "python", platform.python_version()
    yield "system", platform.platform()
    yield "cores", str(count_cores())
    yield "CPU memory", show_bytes(total_cpu_memory())
    yield "GPUs", ", ".join(_gpu_names()) or "none"
    chosen = os.environ.get(PJRT_DEVICE)
    yield "TPU", find_tpu(os.environ) or (f"{PJRT_DEVICE} is {chosen}" if chosen else "none")


def _gpu_names() -> list[str]:
    if not has_gpu_driver():
        return []
    import torch

    return [
        f"{gpu.name} ({show_bytes(gpu.total_memory)})"
        for gpu in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]
