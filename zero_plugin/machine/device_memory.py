"""How fast a loop goes, and how much memory is left."""

from __future__ import annotations

import gc
import time

import torch

from zero_plugin.machine.memory import available_cpu_memory


class Meter:
    """Throughput between two readings.

    Args:
        processes: how many run, each taken to be as fast as this one.
        device: where this process computes.
    """

    def __init__(self, processes: int, device: torch.device) -> None:
        self._processes = processes
        self._device = device
        self._since = time.perf_counter()

    def read(self, units: int, unit: str) -> dict[str, float]:
        """`<unit>_per_second` since the last reading, if any `units` are told, and `memory_available_gb`."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        values = {f"{unit}_per_second": units * self._processes / max(seconds, 1e-9)} if units else {}
        return values | {"memory_available_gb": memory_available_bytes(self._device) / 1e9}


def memory_available_bytes(device: torch.device) -> int:
    """Memory that could still be taken: of a GPU, else of the CPUs."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) + _cached_bytes(device)
    return available_cpu_memory()


def peak_bytes(device: torch.device) -> int | None:
    """The most that torch's allocator has handed out on the device so far; None on one that has no such count."""
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else None


def _cached_bytes(device: torch.device) -> int:
    """What torch's allocator holds and does not use."""
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Return the memory that torch's allocator holds unused to the device.

    Args:
        garbage_collection: collect garbage first, which takes long.
    """
    if garbage_collection:
        gc.collect()
    torch.cuda.empty_cache()  # does nothing where CUDA was not used
