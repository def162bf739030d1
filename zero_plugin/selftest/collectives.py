"""Collectives on the run's own backend: every value is looked at, and the bandwidth measured."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from zero_plugin.selftest.outcome import CheckError, LeftOut
from zero_plugin.selftest.run import Run, speed, stopwatch

__all__ = ["check_all_gather", "check_all_reduce", "check_barrier", "check_broadcast"]

_BARRIERS = 20
_BYTES = {"cuda": 256 * 2**20, "cpu": 16 * 2**20}  # of the whole result
_REPEATED = 3


def check_barrier(run: Run) -> str:
    """All processes meet, and how long that takes."""
    _need_several(run)
    dist.barrier()
    with stopwatch(run.device) as watch:
        for _ in range(_BARRIERS):
            dist.barrier()
    return f"{run.processes} processes, {watch.seconds / _BARRIERS * 1e3:.2g} ms each by {dist.get_backend()}"


def check_all_reduce(run: Run) -> str:
    """Sums of known values; bandwidth as NCCL's tests define it: what each process must send, 2 (n-1)/n of the size."""
    _need_several(run)
    ramp = _ramp(run)
    wanted = ramp * (run.processes * (run.processes + 1) // 2)
    buffer = torch.empty_like(ramp)
    seconds = []
    for _ in range(_REPEATED):
        buffer.copy_(ramp * (run.accelerator.process_index + 1))
        with stopwatch(run.device) as watch:
            dist.all_reduce(buffer)
        seconds.append(watch.seconds)
        _compare(buffer, wanted)
    return _told(buffer, min(seconds), 2 * (run.processes - 1) / run.processes)


def check_all_gather(run: Run) -> str:
    """Each process's values at its place; bandwidth of what each must receive, (n-1)/n of the result."""
    _need_several(run)
    own = _ramp(run).chunk(run.processes)[0].contiguous()
    wanted = torch.cat([own + rank for rank in range(run.processes)])
    result = torch.empty_like(wanted)
    seconds = []
    for _ in range(_REPEATED):
        result.zero_()
        with stopwatch(run.device) as watch:
            dist.all_gather(list(result.chunk(run.processes)), own + run.accelerator.process_index)
        seconds.append(watch.seconds)
        _compare(result, wanted)
    return _told(result, min(seconds), (run.processes - 1) / run.processes)


def check_broadcast(run: Run) -> str:
    """The last process's values on all; bandwidth of what each receives."""
    _need_several(run)
    ramp, last = _ramp(run), run.processes - 1
    buffer = torch.empty_like(ramp)
    seconds = []
    for _ in range(_REPEATED):
        buffer.copy_(ramp if run.accelerator.process_index == last else torch.zeros_like(ramp))
        with stopwatch(run.device) as watch:
            dist.broadcast(buffer, src=last)
        seconds.append(watch.seconds)
        _compare(buffer, ramp)
    return _told(buffer, min(seconds), 1.0)


def _need_several(run: Run) -> None:
    if run.processes == 1:
        raise LeftOut("there is one process")


def _ramp(run: Run) -> Tensor:
    """Whole numbers small enough for fp32 to add up exactly."""
    count = _BYTES[run.carried.type] // 4
    return torch.arange(count, device=run.carried).remainder_(997).float()


def _compare(found: Tensor, wanted: Tensor) -> None:
    if wrong := int((found != wanted).sum()):
        first = int((found != wanted).nonzero()[0])
        raise CheckError(
            f"{wrong:,} of {found.numel():,} values are wrong, the first at {first:,}: "
            f"{found[first].item():g} where {wanted[first].item():g} should be"
        )


def _told(buffer: Tensor, seconds: float, share: float) -> str:
    size = buffer.numel() * buffer.element_size()
    return f"values right; {speed(size * share, seconds)} per process ({size / 2**20:.0f} MiB)"
