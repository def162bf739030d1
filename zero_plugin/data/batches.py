"""Operations on batches: move, watch, count, cut and join them, and gather metrics of their samples."""

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
        batch: the result of the loader's collate function.
        samples: samples in the batch, including repeated ones; None if the dataset makes the batches, uncounted.
        real: how many of them, from the front, are not repeated ones; None for all.
        fingerprint: checksum of the beginning of its stream; None if streams need not agree.
    """

    batch: Any
    samples: int | None
    real: int | None
    fingerprint: int | None = None


def move_batch(batch: Any, device: torch.device | None, *, non_blocking: bool = False) -> Any:
    """Return the batch in new containers, with every tensor on `device`, however nested; the rest is unchanged.

    Args:
        batch: the result of a collate function, which may reuse its containers for the next batch.
        device: the target; None moves nothing.
        non_blocking: do not wait for the copy; it overlaps with the computation if the loader pins its memory.
    """

    def move_leaf(leaf: Any) -> Any:
        if device is None:
            return leaf
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        return leaf.to(device) if _moves_itself(leaf) else leaf

    # Objects such as a PackedSequence or a graph move themselves. A mapping such as a BatchEncoding is moved tensor by
    # tensor, because its own `to` waits for the copy.
    return map_leaves(
        move_leaf, batch, is_leaf=lambda inner: _moves_itself(inner) and not isinstance(inner, MutableMapping)
    )


def _moves_itself(node: Any) -> bool:
    return hasattr(node, "to") and not isinstance(node, type)


class OverwriteCheck:
    """A check whether reading further batches or samples overwrites one that is still in use.

    Args:
        tree: the batch or sample. Its tensors, arrays and objects with a method `to` are watched; no other part can be
            refilled.
    """

    def __init__(self, tree: Any) -> None:
        self._leaves = [(leaf, _copy(leaf)) for leaf in list_leaves(tree) if _may_be_refilled(leaf)]

    def check(self, following: Any = None) -> None:
        """Check that nothing was overwritten.

        Args:
            following: the batch or samples that were read since this object was constructed.

        Raises:
            LoopError: a tensor, an array or an object was overwritten or was yielded again.
        """
        made = {id(leaf) for leaf in list_leaves(following)}
        for leaf, copy in self._leaves:
            if id(leaf) in made if copy is None else not _is_equal(leaf, copy):
                raise LoopError(
                    f"the dataset or its collate function refills one {_name(leaf)}: reading further samples has "
                    "overwritten a sample that is still in use. One batch is read ahead if the length of the data is "
                    "not known, and processes that share a stream also read each other's samples.\nGive each sample "
                    "its own memory: tensor.clone(), or array.copy()."
                )


def _may_be_refilled(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.layout is torch.strided and leaf.device.type in ("cpu", "cuda") and not leaf.is_nested
    return isinstance(leaf, np.ndarray) or _moves_itself(leaf)  # an object cannot be compared, only recognised


def _copy(leaf: Any) -> Any:
    """Return a copy of a tensor or an array; None for objects, which can only be recognised."""
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    return leaf.copy() if isinstance(leaf, np.ndarray) else None


def _is_equal(leaf: Any, copy: Any) -> bool:
    """Compare bit by bit: NaN equals NaN."""
    if isinstance(leaf, Tensor):
        parts = (tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (leaf, copy))
        return torch.equal(*parts)
    if leaf.dtype.hasobject:
        return all(one is other for one, other in zip(leaf.flat, copy.flat, strict=True))
    return bool(leaf.tobytes() == copy.tobytes())


def _name(leaf: Any) -> str:
    return "tensor" if isinstance(leaf, Tensor) else "array" if isinstance(leaf, np.ndarray) else type(leaf).__name__


def count_rows(batch: Any) -> int | None:
    """Count the samples of a batch: rows of its first tensor, or members of its first list without tensors.

    Tensors without a dimension do not count: they hold one value for the entire batch. None if nothing can be counted.
    """
    rows = next((leaf.shape[0] for leaf in list_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), None)
    columns = filter(is_object_column, list_leaves(batch, is_object_column))
    return next(map(len, columns), None) if rows is None else rows


def cut_rows(batch: Any, rows: slice, process_index: int | None = None, num_processes: int | None = None) -> Any:
    """Return the batch with some of its samples.

    Tensors and lists with one row per sample are cut. Parts of another length, or of none, belong to the entire batch
    and stay.

    Args:
        batch: a collated batch.
        rows: the rows to keep of every tensor, and of every list without tensors.
        process_index, num_processes: not used here; a user's function that replaces this one may need them.
    """
    del process_index, num_processes
    count = count_rows(batch)
    return map_leaves(lambda node: node[rows] if _has_rows(node, count) else node, batch, is_leaf=is_object_column)


def _has_rows(node: Any, count: int | None) -> bool:
    """Return whether a part of a batch has one row, or one object, for each of `count` samples."""
    if isinstance(node, Tensor):
        return node.ndim > 0 and node.shape[0] == count
    return is_object_column(node) and len(node) == count


def join_rows(batches: Sequence[Any]) -> Any:
    """Join batches of the same structure into one, in order.

    Parts that belong to an entire batch are taken from the first.

    Raises:
        LoopError: tensors differ beyond their first dimension.
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
            "dispatch_batches: the batches of one step differ beyond their first dimension and cannot be joined. "
            "Write dispatch_batches=None: each process then reads its own batches. Or pad all batches to one length."
        ) from error


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Return the batch with `function(tensor)` instead of every tensor."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def is_object_column(node: Any, *, with_tensors: bool = False) -> bool:
    """Return whether `node` has one object per sample: a list, or a plain tuple of anything except containers.

    Args:
        node: a part of a batch, or of values that a loop computed from the batch.
        with_tensors: an object may be, or hold, a tensor. If False, a list of tensors is a container.
    """
    if type(node) is tuple and any(isinstance(member, list | tuple | Mapping) for member in node):
        return False
    if type(node) not in (list, tuple):
        return False
    return with_tensors or not any(isinstance(leaf, Tensor) for leaf in list_leaves(node))


def gather_for_metrics(tree: Any, loader: DataLoaderStateMixin | None, use_gather_object: bool = False) -> Any:
    """Gather per-sample values of the current batch from all processes, in the order of the single-process loader.

    Every process cuts off the samples that were repeated to make its batch even, then the rest is gathered. So a
    complete loop collects exactly the dataset: each sample once, in order.

    A list without tensors, or a plain tuple of anything except containers, holds one object per sample; a list is
    returned. A NumPy array has one row per sample; an array is returned. Other containers keep their structure.

    A 0-dimensional tensor or array, or a single object, is one value for the batch. One value is returned per batch of
    the single-process loader, because a process whose batch has only repeated samples contributes none. The mean over a
    partly repeated batch includes repeated samples, which is logged. Gather one value per sample to be exact.

    Args:
        tree: tensors and arrays with one row per sample of the batch, or 0-dimensional; lists with one object per
            sample; single objects; in any containers.
        loader: the loader that is being iterated, or None.
        use_gather_object: lists of tensors also hold one tensor per sample, of any sizes; a tensor is returned as a
            list of its rows.

    Raises:
        LoopError: several processes run, and no loop over a prepared loader; the values do not have one row per sample;
            or the sampler may repeat samples without reporting it, so padding cannot be recognised.
    """
    if loader is None:
        if num_processes() > 1:
            raise LoopError(
                "gather_for_metrics: no prepared loader is being iterated, so repeated samples are not known. "
                "Call it inside `for batch in loader:` with a loader from prepare(), or use gather()."
            )
        loader = DataLoaderStateMixin()
    if loader.repeats_unseen is not None:
        raise LoopError(
            f"gather_for_metrics: the loader's {loader.repeats_unseen} shares the samples among the processes, and may "
            "repeat some to make all even. Remove the sampler: prepare() then shares the samples. Or use gather()."
        )

    def is_column(node: Any) -> bool:
        return is_object_column(node, with_tensors=use_gather_object)

    own = [_cut(column, loader) for column in list_leaves(tree, is_column)]
    if use_gather_object:
        # Objects are sent with pickle: a tensor on a GPU would arrive on the sender's GPU.
        on_cpu = map_tensors(lambda tensor: tensor.detach().cpu(), own)
        own = [list(column) if isinstance(column, Tensor) else column for column in on_cpu]
    tensors = iter(gather([column.detach() for column in own if isinstance(column, Tensor)]))
    objects = [column for column in own if not isinstance(column, Tensor)]
    everybodys = zip(*gather_object([objects]), strict=True) if objects else ()
    lists = iter([_join(parts) for parts in everybodys])
    gathered = iter([next(tensors if isinstance(column, Tensor) else lists) for column in own])
    return map_leaves(lambda _: next(gathered), tree, is_leaf=is_column)


def _join(parts: Sequence[Any]) -> Any:
    """Join the processes' parts of one column of objects, or of an array."""
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    return [value for part in parts for value in part]


def _cut(column: Any, loader: DataLoaderStateMixin) -> Any:
    """Return the real samples' part of a column; of a value for the entire batch, one row or none."""
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
                f"gather_for_metrics: a value for the entire batch counts {samples - real} repeated samples of "
                f"{samples}; gather one value per sample to leave them out",
                by_each=True,
            )
        one = column.reshape(1) if isinstance(column, Tensor) else [column]
        return one[: 0 if real == 0 else 1]
    return column if real is None else column[:real]


def _check_rows(what: str, rows: int, loader: DataLoaderStateMixin) -> None:
    """Check the number of rows at every step: a mistake is then an error at the first step, on all processes."""
    samples = loader.batch_samples
    # `loss.repeat(batch_size)` is common, even if the last batch is shorter: its first rows are used then.
    if samples is not None and rows not in (samples, loader.batch_size):
        raise LoopError(
            f"gather_for_metrics: found {what}, but the batch holds {samples} samples. Pass one row per sample: "
            "repeated samples are then cut off. For other values use gather()."
        )
