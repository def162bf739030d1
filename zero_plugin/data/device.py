"""Move a batch to the device."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor

from zero_plugin.nested import map_leaves

__all__ = ["move_batch"]


def move_batch(batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """The batch with every tensor on `device`, however nested; what cannot move stays as it is.

    With `non_blocking` the copy is not waited for; it overlaps with the computation if the loader pins its memory.
    """
    return _move(batch, device, non_blocking)


def _move(node: Any, device: torch.device, non_blocking: bool) -> Any:
    kind = type(node)  # the common kinds first: a tiny model's step is not much longer than looking for the others
    if kind is Tensor:
        return node.to(device, non_blocking=non_blocking)
    if kind is list:
        return [_move(value, device, non_blocking) for value in node]
    if kind is tuple:
        return tuple([_move(value, device, non_blocking) for value in node])
    if kind is dict:
        return {key: _move(value, device, non_blocking) for key, value in node.items()}

    def move_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        return leaf.to(device) if _moves_itself(leaf) else leaf

    # A PackedSequence or a graph knows best how it moves; a BatchEncoding's own `to` waits for the copy.
    return map_leaves(
        move_leaf, node, is_leaf=lambda inner: _moves_itself(inner) and not isinstance(inner, MutableMapping)
    )


def _moves_itself(node: Any) -> bool:
    return hasattr(node, "to") and not isinstance(node, type)
