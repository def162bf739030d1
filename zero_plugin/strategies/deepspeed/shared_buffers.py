"""Gives every process the first one's buffers, as DDP does: running statistics are of one process' batches."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["SharedBuffers"]


class SharedBuffers:
    """The persistent buffers of a module, which each process would change by its own batches.

    DDP sends them before each forward. Here they are sent where all processes come anyway, so that a forward on one
    process alone stays possible: what the first process has, which is what counts, is the same.

    Args:
        module: the user's own.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = [
            (part, name)
            for part in module.modules()
            for name in part._buffers
            if name not in part._non_persistent_buffers_set
        ]

    def send(self) -> None:
        """From the first process to the others, in one broadcast per device. Collective."""
        if not self._places or dist.get_world_size() == 1:
            return
        found = [part._buffers.get(name) for part, name in self._places]  # a forward may have put new tensors there
        unique = {id(b): b for b in found if b is not None and b.layout == torch.strided and b.numel()}
        by_device: dict[torch.device, list[Tensor]] = {}
        for buffer in unique.values():
            by_device.setdefault(buffer.device, []).append(buffer.data)  # a graph may be kept
        for buffers in by_device.values():
            pieces = [buffer.reshape(-1).view(torch.uint8) for buffer in buffers]  # of any type, together
            joined = torch.cat(pieces)
            dist.broadcast(joined, 0)
            if dist.get_rank() > 0:
                for buffer, sent in zip(buffers, torch.split(joined, [len(p) for p in pieces]), strict=True):
                    buffer.copy_(sent.clone().view(buffer.dtype).view(buffer.shape))
