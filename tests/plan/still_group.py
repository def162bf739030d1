"""Processes that exchange tensors without another thread ever holding one, so allocations can be counted.

torch's profiler counts an allocation in the thread that makes it and a release in the thread that drops the last
reference. If that thread is gloo's, shortly after the wait for it has ended, the release is not counted, and the tensor
seems to stay forever.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future

GLOO = dist.ProcessGroup.BackendType.GLOO
_addresses: set[int] = set()


class StillGroup(dist.ProcessGroup):
    """A group in which gloo gets, and changes in place, copies in memory that torch has not allocated.

    Every used operation is defined here. The base class's would hold Python's lock while it waits for gloo's lock.
    gloo's thread with that lock may wait for Python's.
    """

    def __init__(self, store: dist.Store, rank: int, world: int, timeout: timedelta) -> None:
        super().__init__(rank, world)
        self.gloo = dist.ProcessGroupGloo(store, rank, world, timeout)
        self.gloo._set_sequence_number_for_group()
        self._register_backend(torch.device("cpu"), GLOO, self.gloo)
        self._set_default_backend(GLOO)

    def barrier(self, opts: Any) -> dist.Work:
        return self.gloo.barrier(opts)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        for tensor in tensors:
            staged = staging(tensor.nbytes, tensor.dtype).copy_(tensor.flatten())
            self.gloo.allreduce([staged], opts or dist.AllreduceOptions()).wait()
            tensor.copy_(staged.view_as(tensor))
        return done(tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        for tensor in tensors:
            staged = staging(tensor.nbytes, tensor.dtype).copy_(tensor.flatten())
            self.gloo.broadcast([staged], opts).wait()
            tensor.copy_(staged.view_as(tensor))
        return done(tensors)

    def all_gather_single(self, output: Tensor, part: Tensor, opts: Any) -> dist.Work:
        output.copy_(self._gathered(part).view_as(output))
        return done([output])

    def allgather(self, outputs: list[list[Tensor]], parts: list[Tensor], opts: Any) -> dist.Work:
        for places, part in zip(outputs, parts, strict=True):
            for place, found in zip(places, self._gathered(part).chunk(self.size()), strict=True):
                place.copy_(found.view_as(place))
        return done(outputs[0])

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any) -> dist.Work:
        reduce = dist.AllreduceOptions()
        reduce.reduceOp = opts.reduceOp
        staged = staging(whole.nbytes, whole.dtype).copy_(whole.flatten())
        self.gloo.allreduce([staged], reduce).wait()
        output.copy_(staged.chunk(self.size())[self.rank()].view_as(output))
        return done([output])

    def _gathered(self, part: Tensor) -> Tensor:
        """Return all parts as a sum: each process adds its own part and zeros for the others."""
        staged = staging(part.nbytes * self.size(), torch.uint8).zero_()
        typed = staged.view(part.dtype)
        typed.chunk(self.size())[self.rank()].copy_(part.flatten())
        self.gloo.allreduce([staged], dist.AllreduceOptions()).wait()
        return typed


def staging(size: int, dtype: torch.dtype) -> Tensor:
    """Return this number of bytes outside torch's allocator, the same ones each time."""
    return _memory(size)[:size].view(dtype)


@functools.cache
def _memory(size: int) -> Tensor:
    """Return one byte for zero, since an empty buffer does not exist."""
    found = torch.frombuffer(bytearray(size or 1), dtype=torch.uint8)
    _addresses.add(found.untyped_storage().data_ptr())
    return found


def is_staging(tensor: Tensor) -> bool:
    """Return whether the tensor is in gloo's memory."""
    return tensor.untyped_storage().data_ptr() in _addresses


def done(results: list[Tensor]) -> dist.Work:
    """Return finished work, whose results DDP reads."""
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    future.set_result(results)
    return _create_work_from_future(future)


dist.Backend.register_backend("still", StillGroup, devices=["cpu"])
