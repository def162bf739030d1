"""Gives models that were built without memory what a process keeps of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from zero_plugin.bigmodel.tensors import parameter_like, tensor_slots

__all__ = ["allot_whole", "replace_empty"]


def allot_whole(module: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Memory for all of every tensor that is on the meta device.

    Args:
        module: any.
        device: where it is from now on.
        dtype: of floating parameters; None for their own.
    """

    def make(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            return torch.empty_like(tensor, device=device)
        kept = dtype if tensor.is_floating_point() else None
        return parameter_like(tensor, torch.empty_like(tensor, device=device, dtype=kept))

    replace_empty(module, make)


def replace_empty(module: nn.Module, make: Callable[[Tensor], Tensor]) -> None:
    """Put what `make` makes of it in the place of every tensor on the meta device; one that is shared stays so."""
    made: dict[int, tuple[Tensor, Tensor]] = {}  # with the old one, so that its id stays its own
    for slot in tensor_slots(module, recurse=True):
        old = slot.tensor
        if old.is_meta:
            if id(old) not in made:
                made[id(old)] = (old, make(old))
            slot.tensor = made[id(old)][1]
