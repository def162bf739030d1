"""How fast a loop goes, and how much memory is left."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


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
    """Memory that could still be taken: of a GPU, else of this machine or container; None where that is not known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) + _cached_bytes(device)
    kilobytes = _read_counts(_MEMINFO).get("MemAvailable:")
    if kilobytes is None:  # not Linux
        return None
    limit, used = (_read_number(_CGROUP / f"memory.{name}") for name in ("max", "current"))
    if limit is None or used is None:
        return kilobytes * 1024
    cached = _read_counts(_CGROUP / "memory.stat")  # of files, which the system drops before it refuses memory
    held = used - cached.get("active_file", 0) - cached.get("inactive_file", 0)
    return max(0, min(kilobytes * 1024, limit - held))


def peak_bytes(device: torch.device) -> int | None:
    """The most that torch's allocator has handed out on the device so far; None on one that has no such count."""
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else None


def _read_counts(file: Path) -> dict[str, int]:
    """The first number of each line by the word before it; empty where there is no such file."""
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in map(str.split, lines) if len(words) > 1 and words[1].isdigit()}


def _read_number(file: Path) -> int | None:
    """What a file says; None where there is none, or it says no number (`max`: no limit)."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


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
