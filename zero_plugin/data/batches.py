"""What a batch is made of: how it is moved, kept, counted, cut and joined, and how metrics are gathered of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zero_plugin.data.active import DataLoaderStateMixin
from zero_plugin.distributed.collectives import announce, gather, gather_object, num_processes
from zero_plugin.errors import LoopError
from zero_plugin.tensors.nested import list_leaves, map_leaves


class Portion(NamedTuple):
    """A collated batch with its counts.

    Attributes:
        batch: what the loader's collate function made.
        samples: samples in it, repeated ones included; None where the dataset makes the batches and nobody counts.
        real: how many of them, from the front, are not repeated ones; None for all.
        fingerprint: of the beginning of the stream that it comes from; None where streams need not agree.
    """

    batch: Any
    samples: int | None
    real: int | None
    fingerprint: int | None = None


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


class OverwriteCheck:
    """Detects whether reading further batches or samples overwrites one that is still in use.

    Args:
        tree: the batch or sample. Its tensors, arrays and objects that move themselves to a device are watched; nothing
            else in it can be refilled.
    """

    def __init__(self, tree: Any) -> None:
        self._leaves = [(leaf, _copy(leaf)) for leaf in list_leaves(tree) if _may_be_refilled(leaf)]

    def check(self, following: Any = None) -> None:
        """Check that nothing was overwritten.

        Args:
            following: what was read since the construction of this object.

        Raises:
            LoopError: a tensor, an array or an object was overwritten or was yielded again.
        """
        made = {id(leaf) for leaf in list_leaves(following)}
        for leaf, copy in self._leaves:
            if id(leaf) in made if copy is None else not _is_equal(leaf, copy):
                raise LoopError(
                    f"the dataset or its collate function refills one {_name(leaf)}: reading further samples has "
                    "overwritten one that is still in use. One batch is read ahead if the length of the data is not "
                    "known, and processes that share a stream also read each other's samples.\nGive each sample its "
                    "own memory: tensor.clone(), or array.copy()."
                )


def _may_be_refilled(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.layout is torch.strided and leaf.device.type in ("cpu", "cuda") and not leaf.is_nested
    return isinstance(leaf, np.ndarray) or _moves_itself(leaf)  # what holds tensors can only be recognised


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


def count_rows(batch: Any) -> int | None:
    """Samples in a batch: rows of its first tensor, else members of its first list without tensors; None without both.

    Tensors without a dimension, which hold one value for all of the batch, do not count.
    """
    rows = next((leaf.shape[0] for leaf in list_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), None)
    columns = filter(is_object_column, list_leaves(batch, is_object_column))
    return next(map(len, columns), None) if rows is None else rows


def cut_rows(batch: Any, rows: slice, process_index: int | None = None, num_processes: int | None = None) -> Any:
    """The batch with some of its samples.

    Tensors and lists with one row per sample are cut; what has another length, or none, belongs to all of the batch
    and stays.

    Args:
        batch: collated.
        rows: of every tensor, and of every list without tensors.
        process_index: not used here; a user's function that replaces this one may need it.
        num_processes: likewise.
    """
    del process_index, num_processes
    count = count_rows(batch)
    return map_leaves(lambda node: node[rows] if _has_rows(node, count) else node, batch, is_leaf=is_object_column)


def _has_rows(node: Any, count: int | None) -> bool:
    """Whether a part of a batch has one row, or one object, for each of `count` samples."""
    if isinstance(node, Tensor):
        return node.ndim > 0 and node.shape[0] == count
    return is_object_column(node) and len(node) == count


def join_rows(batches: Sequence[Any]) -> Any:
    """Batches of one structure as one, one's samples after the other's.

    What belongs to all of a batch is taken from the first.

    Raises:
        LoopError: tensors that differ beyond their first dimension.
    """
    first, count = batches[0], count_rows(batches[0])
    if len(batches) == 1:
        return first
    parts = [iter(list_leaves(batch, is_object_column)) for batch in batches]

    def join(node: Any) -> Any:
        members = [next(part) for part in parts]
        if not _has_rows(node, count):
            return node
        if isinstance(node, Tensor):
            return torch.cat(members)
        return type(node)(member for column in members for member in column)

    try:
        return map_leaves(join, first, is_leaf=is_object_column)
    except RuntimeError as error:
        raise LoopError(
            "dispatch_batches: the batches of one step differ beyond their first dimension, so they cannot be joined; "
            "write dispatch_batches=None, and each process reads its own, or pad all batches to one length"
        ) from error


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """The batch with `function(tensor)` in place of every tensor."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def is_object_column(node: Any, *, with_tensors: bool = False) -> bool:
    """Whether it is a list, or a plain tuple of anything but containers, of one object per sample.

    Args:
        node: part of a batch, or of what a loop made of it.
        with_tensors: an object may be a tensor, or hold some; else a list of tensors is a container.
    """
    if type(node) is tuple and any(isinstance(member, list | tuple | Mapping) for member in node):
        return False
    if type(node) not in (list, tuple):
        return False
    return with_tensors or not any(isinstance(leaf, Tensor) for leaf in list_leaves(node))


def gather_for_metrics(tree: Any, loader: DataLoaderStateMixin | None, use_gather_object: bool = False) -> Any:
    """The processes' per-sample values for the current batch, in the order of the single-process loader.

    Every process cuts off the samples that were repeated to make its batch even, then the rest is gathered. What a
    complete loop collects so is exactly the dataset, once each, in order.

    A list without tensors, or a plain tuple of anything but containers, holds one object per sample, and comes back as
    a list; an array of NumPy has one row per sample, and comes back as one; other containers keep their shape.

    A 0-dimensional tensor or array or a single object is one value for the batch: gathered, there is one per batch of
    the single-process loader, since a process whose batch holds repeated samples only gives none. A mean over a batch
    of which a part is repeated counts those samples too; that is logged, and values per sample are the exact way.

    Args:
        tree: tensors and arrays with one row per sample of the batch, or 0-dimensional; lists with one object per
            sample; single objects; in any containers.
        loader: the loader that is being iterated; None where there is none.
        use_gather_object: lists of tensors, too, hold one per sample, of any sizes; and of a tensor, come the rows as a
            list.

    Raises:
        LoopError: with several processes outside a loop over a prepared loader, or the values do not have one row per
            sample, or the samples come from a sampler that may repeat some unseen: what is padding in them cannot be
            known.
    """
    if loader is None:
        if num_processes() > 1:
            raise LoopError(
                "gather_for_metrics: no prepared loader is being iterated, so nothing says which samples are repeated; "
                "call it inside `for batch in loader:` with a loader from prepare(), or use gather()"
            )
        loader = DataLoaderStateMixin()
    if loader.repeats_unseen is not None:
        raise LoopError(
            f"gather_for_metrics: the loader's {loader.repeats_unseen} shares the samples among the processes, and may "
            "repeat some to make all even; leave it out, so that prepare() shares them, or use gather()"
        )

    def is_column(node: Any) -> bool:
        return is_object_column(node, with_tensors=use_gather_object)

    own = [_cut(column, loader) for column in list_leaves(tree, is_column)]
    if use_gather_object:
        # Objects travel by pickle: a tensor on a GPU would come back on the sender's.
        on_cpu = map_tensors(lambda tensor: tensor.detach().cpu(), own)
        own = [list(column) if isinstance(column, Tensor) else column for column in on_cpu]
    tensors = iter(gather([column.detach() for column in own if isinstance(column, Tensor)]))
    objects = [column for column in own if not isinstance(column, Tensor)]
    everybodys = zip(*gather_object([objects]), strict=True) if objects else ()
    lists = iter([_join(parts) for parts in everybodys])
    gathered = iter([next(tensors if isinstance(column, Tensor) else lists) for column in own])
    return map_leaves(lambda _: next(gathered), tree, is_leaf=is_column)


def _join(parts: Sequence[Any]) -> Any:
    """The processes' parts of one column of objects, or of an array."""
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    return [value for part in parts for value in part]


def _cut(column: Any, loader: DataLoaderStateMixin) -> Any:
    """The real samples' part; of a value for all of the batch, one row or none."""
    real = loader.real_samples
    if isinstance(column, Tensor | np.ndarray) and column.ndim:
        what = "a tensor" if isinstance(column, Tensor) else "an array"
        _check_rows(f"{what} of shape {tuple(column.shape)}", column.shape[0], loader)
    elif isinstance(column, list | tuple):
        _check_rows(f"a {type(column).__name__} of {len(column)}", len(column), loader)
    else:
        samples = loader.batch_samples
        if samples is not None and real is not None and 0 < real < samples:
            announce(
                f"gather_for_metrics: a value for all of the batch counts {samples - real} repeated samples of "
                f"{samples}; gather one value per sample to leave them out",
                by_each=True,
            )
        one = column.reshape(1) if isinstance(column, Tensor) else [column]
        return one[: 0 if real == 0 else 1]
    return column if real is None else column[:real]


def _check_rows(what: str, rows: int, loader: DataLoaderStateMixin) -> None:
    """Check the number of rows at every step, so that a mistake is an error at the first, on all processes at once."""
    samples = loader.batch_samples
    # `loss.repeat(batch_size)` is common, also where the last batch is shorter: then its first rows are meant.
    if samples is not None and rows not in (samples, loader.batch_size):
        raise LoopError(
            f"gather_for_metrics: found {what}, the batch holds {samples} samples; give one row per sample, so that "
            "repeated samples can be cut off, or use gather() for anything else"
        )
