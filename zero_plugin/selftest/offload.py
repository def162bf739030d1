"""Round trips between host and device, and to the NVMe folders that the configuration names."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

from zero_plugin.selftest.outcome import CheckError, LeftOut
from zero_plugin.selftest.run import Run, speed, stopwatch

__all__ = ["check_host_and_device", "check_nvme"]

_COPIED = {"cuda": 256 * 2**20, "xla": 32 * 2**20}  # bytes
_SWAPPED = 64 * 2**20


def check_host_and_device(run: Run) -> str:
    """Copy from host memory to the device and back; for a GPU, from pinned memory."""
    if run.device.type == "cpu":
        raise LeftOut("the run is on the CPU, where all is in host memory")
    size = _COPIED[run.device.type]
    host = torch.arange(size // 4, dtype=torch.int32)
    if run.device.type == "xla":  # which notes a copy down, and makes it when somebody looks
        with stopwatch(run.device) as both:
            back = host.to(run.device).cpu()
        told = f"to the device and back {speed(2 * size, both.seconds)}"
    else:
        host, back = host.pin_memory(), torch.empty_like(host).pin_memory()
        there = host.to(run.device)
        with stopwatch(run.device) as going:
            there.copy_(host, non_blocking=True)
        with stopwatch(run.device) as coming:
            back.copy_(there, non_blocking=True)
        told = f"to the GPU {speed(size, going.seconds)}, back {speed(size, coming.seconds)}"
    if not torch.equal(host, back):
        raise CheckError("what comes back from the device is not what was sent")
    return f"{told}, all processes at once"


def check_nvme(run: Run) -> str:
    """Write and read a file by DeepSpeed's own asynchronous I/O, as its offload does."""
    folders = _nvme_folders(run)
    if not folders:
        raise LeftOut("nothing is offloaded to NVMe")

    from zero_plugin.strategies.deepspeed.nvme_speed import measure_nvme

    said = []
    for folder in folders:
        with tempfile.TemporaryDirectory(prefix="zero_plugin-test-", dir=folder) as own:
            file = Path(own) / f"rank-{run.accelerator.process_index}"
            aio = run.accelerator.document.deepspeed.section("aio").nested()
            trip = measure_nvme(file, _SWAPPED, {key: value for key, value in aio.items() if value != "auto"})
        if not trip.equal:
            raise CheckError(f"what is read from {folder} is not what was written")
        wrote, read = speed(_SWAPPED, trip.write_seconds), speed(_SWAPPED, trip.read_seconds)
        said.append(f"{folder}: writes {wrote}, reads {read}, per process and all at once")
    return "; ".join(said)


def _nvme_folders(run: Run) -> Iterable[str]:
    zero = run.accelerator.document.deepspeed.section("zero_optimization")
    sections = [zero.section(f"offload_{what}") for what in ("optimizer", "param")]
    paths = [section.value("nvme_path") for section in sections if section.value("device") == "nvme"]
    for path in dict.fromkeys(paths):
        Path(path).mkdir(parents=True, exist_ok=True)
    return list(dict.fromkeys(paths))
