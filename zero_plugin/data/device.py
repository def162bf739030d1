"""Move a batch to the device."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch

from zero_plugin.nested import map_leaves

__all__ = ["move_batch"]


def move_batch(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor on `device`, however nested; what cannot move stays as it is.

    On CUDA the copy is not waited for; it overlaps with the computation if the loader pins its memory.
    """

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=device.type == "cuda")
        return leaf.to(device) if hasattr(leaf, "to") else leaf

    # A PackedSequence or a graph knows best how it moves; a BatchEncoding's own `to` waits for the copy.
    return map_leaves(move, batch, is_leaf=lambda node: hasattr(node, "to") and not isinstance(node, MutableMapping))
