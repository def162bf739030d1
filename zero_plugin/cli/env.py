"""`zero-plugin env`: versions, devices and the default config, for a bug report."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator

import zero_plugin
from zero_plugin.config.amounts import show_bytes
from zero_plugin.config.find import find_config_file
from zero_plugin.config.packages import installed_version
from zero_plugin.machine.hardware import count_cores, has_gpu_driver
from zero_plugin.machine.memory import total_cpu_memory
from zero_plugin.machine.xla_runtime import PJRT_DEVICE, find_tpu

_PACKAGES = ("torch", "torch_xla", "deepspeed", "transformers", "accelerate", "peft", "safetensors", "numpy")


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
