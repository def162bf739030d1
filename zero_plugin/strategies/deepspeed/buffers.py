"""`SharedBuffers`: a module's buffers, e.g. running statistics, are those of rank 0 on all processes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn


class SharedBuffers:
    """The persistent buffers of a module, e.g. running statistics; `send` synchronizes them with rank 0.

    DDP broadcasts them before each forward. The session broadcasts them when all processes communicate anyway, so one
    process alone can run a forward. The values of rank 0 are the same in both cases.

    Args:
        module: the user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = [
            (part, name)
            for part in module.modules()
            for name in part._buffers
            if name not in part._non_persistent_buffers_set
        ]

    def send(self) -> None:
        """Broadcast the buffers of rank 0, in one operation per device. Collective."""
        if not self._places or dist.get_world_size() == 1:
            return
        found = [part._buffers.get(name) for part, name in self._places]  # a forward may have replaced the tensors
        unique = {id(b): b for b in found if b is not None and b.layout == torch.strided and b.numel()}
        by_device: dict[torch.device, list[Tensor]] = {}
        for buffer in unique.values():
            by_device.setdefault(buffer.device, []).append(buffer.data)  # without autograd
        for buffers in by_device.values():
            pieces = [buffer.reshape(-1).view(torch.uint8) for buffer in buffers]  # bytes: one send for all dtypes
            joined = torch.cat(pieces)
            dist.broadcast(joined, 0)
            if dist.get_rank() > 0:
                for buffer, sent in zip(buffers, torch.split(joined, [len(p) for p in pieces]), strict=True):
                    buffer.copy_(sent.clone().view(buffer.dtype).view(buffer.shape))
