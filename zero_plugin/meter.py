"""How fast a loop goes, and how much memory is left."""

from __future__ import annotations

import time
from pathlib import Path

import torch

__all__ = ["Meter", "memory_available_bytes"]


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
        available = memory_available_bytes(self._device)
        return values if available is None else values | {"memory_available_gb": available / 1e9}


def memory_available_bytes(device: torch.device) -> int | None:
    """Memory that could still be taken: of a GPU, else of this machine; None where that is not known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) + _cached_bytes(device)
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux
        return None
    kilobytes = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if kilobytes is None else int(kilobytes) * 1024


def _cached_bytes(device: torch.device) -> int:
    """What torch's allocator holds and does not use."""
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
