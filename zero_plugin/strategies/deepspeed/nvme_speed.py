"""How fast DeepSpeed's asynchronous I/O writes and reads a file, with the settings of its offload."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.runtime.swap_tensor.aio_config import get_aio_config

__all__ = ["RoundTrip", "measure_nvme"]


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """Seconds of writing and reading, and whether what was read is what was written."""

    write_seconds: float
    read_seconds: float
    equal: bool


def measure_nvme(file: Path, size: int, aio: Mapping[str, Any]) -> RoundTrip:
    """Write `size` bytes from locked memory into `file`, and read them again past the page cache.

    Args:
        file: is made; the caller removes it.
        size: bytes, a multiple of 1 MiB.
        aio: the configuration's `aio` section; what it leaves out is DeepSpeed's default.
    """
    settings = get_aio_config({"aio": dict(aio)})
    names = ("block_size", "queue_depth", "single_submit", "overlap_events", "intra_op_parallelism")
    handle = AsyncIOBuilder().load(verbose=False).aio_handle(*(settings[name] for name in names))
    out, back = (handle.new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8)) for _ in range(2))
    try:
        out.copy_(torch.arange(size, dtype=torch.int64).remainder_(251))
        back.zero_()
        seconds = []
        for start, buffer in ((handle.async_pwrite, out), (handle.async_pread, back)):
            began = time.perf_counter()
            start(buffer, str(file), 0)
            handle.wait()
            seconds.append(max(time.perf_counter() - began, 1e-9))
        return RoundTrip(seconds[0], seconds[1], torch.equal(out, back))
    finally:
        handle.free_cpu_locked_tensor(out)
        handle.free_cpu_locked_tensor(back)
