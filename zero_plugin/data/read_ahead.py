"""What a loop reads of its epoch before it needs it, and that this spoils nothing it holds; moving a batch."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zero_plugin.data.division import Portion
from zero_plugin.errors import LoopError
from zero_plugin.tensors.nested import list_leaves, map_leaves


class Kept:
    """What of a batch or a sample has to stay as it is while others are read.

    Args:
        tree: where tensors, arrays and what moves itself to a device are looked for; everything else stays by itself.
    """

    def __init__(self, tree: Any) -> None:
        self._leaves = [(leaf, _copy(leaf)) for leaf in list_leaves(tree) if _may_be_refilled(leaf)]

    def check(self, following: Any = None) -> None:
        """Find what was overwritten.

        Args:
            following: what was read meanwhile.

        Raises:
            LoopError: something was.
        """
        made = {id(leaf) for leaf in list_leaves(following)}
        for leaf, copy in self._leaves:
            if id(leaf) in made if copy is None else not _is_equal(leaf, copy):
                raise LoopError(
                    f"the dataset or its collate function refills one {_name(leaf)}: reading on has changed what is "
                    "still in use. Of data without a sure length one batch is read ahead, to know which is the epoch's "
                    "last, and where processes share a stream each reads past the others' samples.\nGive each sample "
                    "its own memory: tensor.clone(), or array.copy()."
                )


class Reading:
    """One loop's reading of an epoch, at most one batch beyond the one that the loop has.

    Args:
        portions: those of this process; each is read when it is asked for.
        refills: whether what reads them may write into memory that it gave before.
    """

    def __init__(self, portions: Iterable[Portion] = (), *, refills: bool = False) -> None:
        self._portions = iter(portions)
        self._refills = refills
        self._following: list[Portion | None] = []  # what was read beyond, None for the end
        self._held: list[Any] = []  # of the loop's batch, what is still where the loader made it

    def take(self) -> Portion | None:
        """The next batch, for the loop; None at the end."""
        self._held = []
        return self._following.pop() if self._following else next(self._portions, None)

    def hold(self, made: Any, given: Any) -> None:
        """The loop is given a batch.

        Args:
            made: as the loader made it.
            given: as the loop gets it: moved to the device, in containers of its own.
        """
        if self._refills:
            unmoved = {id(leaf) for leaf in list_leaves(made)}
            self._held = [leaf for leaf in list_leaves(given) if id(leaf) in unmoved]

    def is_last(self) -> bool:
        """Whether no batch follows the one that the loop has; reads the following one, if that was not done before.

        Raises:
            LoopError: reading has changed the batch that the loop has.
        """
        if not self._following:
            kept = Kept(self._held)
            following = next(self._portions, None)
            self._following.append(following)
            kept.check(following)
            self._held = []
        return self._following[0] is None

    def __reduce__(self) -> tuple[Any, ...]:
        return Reading, ()  # a copied loader has read nothing


def _may_be_refilled(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.layout is torch.strided and leaf.device.type in ("cpu", "cuda") and not leaf.is_nested
    return isinstance(leaf, np.ndarray) or _is_record(leaf)


def _is_record(leaf: Any) -> bool:
    """Whether it holds tensors, which it moves by itself, so that it cannot be compared."""
    return _moves_itself(leaf) and not isinstance(leaf, Tensor)


def _copy(leaf: Any) -> Any:
    """None for what can only be recognised."""
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    return leaf.copy() if isinstance(leaf, np.ndarray) else None


def _is_equal(leaf: Any, copy: Any) -> bool:
    """Bit by bit: what is not a number equals itself."""
    if isinstance(leaf, Tensor):
        parts = (tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (leaf, copy))
        return torch.equal(*parts)
    if leaf.dtype.hasobject:
        return all(one is other for one, other in zip(leaf.flat, copy.flat, strict=True))
    return bool(leaf.tobytes() == copy.tobytes())


def _name(leaf: Any) -> str:
    return "tensor" if isinstance(leaf, Tensor) else "array" if isinstance(leaf, np.ndarray) else type(leaf).__name__


def move_batch(batch: Any, device: torch.device | None, *, non_blocking: bool = False) -> Any:
    """The batch with every tensor on `device`, however nested, in containers of its own; the rest stays as it is.

    Args:
        batch: as a collate function made it, which may use its own containers again.
        device: where to; None moves nothing.
        non_blocking: do not wait for the copy; it overlaps with the computation if the loader pins its memory.
    """

    def move_leaf(leaf: Any) -> Any:
        if device is None:
            return leaf
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        return leaf.to(device) if _moves_itself(leaf) else leaf

    # A PackedSequence or a graph knows best how it moves; a BatchEncoding's own `to` waits for the copy.
    return map_leaves(
        move_leaf, batch, is_leaf=lambda inner: _moves_itself(inner) and not isinstance(inner, MutableMapping)
    )


def _moves_itself(node: Any) -> bool:
    return hasattr(node, "to") and not isinstance(node, type)
