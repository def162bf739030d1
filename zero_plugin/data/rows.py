"""Batches by their rows: count the samples of a collated batch, join several, cut one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_plugin.nested import list_leaves, map_leaves

__all__ = ["count_rows", "cut_rows", "is_object_column", "join_rows"]


def count_rows(batch: Any) -> int | None:
    """Samples in a batch: rows of its first tensor, else members of its first list without tensors; None without both.

    Tensors without a dimension, which hold one value for the whole batch, do not count.
    """
    rows = next((leaf.shape[0] for leaf in list_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), None)
    return next((len(column) for column in _object_columns(batch)), None) if rows is None else rows


def cut_rows(batch: Any, rows: slice, process_index: int | None = None, num_processes: int | None = None) -> Any:
    """The batch with some of its samples.

    Tensors and lists with one row per sample are cut; what has another length, or none, belongs to the batch as a whole
    and stays.

    Args:
        batch: collated.
        rows: of every tensor, and of every list without tensors.
        process_index: not used here; a function of the user's that stands in for this one may want to know.
        num_processes: likewise.
    """
    del process_index, num_processes
    count = count_rows(batch)

    def cut(node: Any) -> Any:
        if isinstance(node, Tensor):
            return node[rows] if node.ndim and node.shape[0] == count else node
        return node[rows] if is_object_column(node) and len(node) == count else node

    return map_leaves(cut, batch, is_leaf=is_object_column)


def join_rows(batches: Sequence[Any]) -> Any:
    """Batches of one structure as one, one's samples after the other's.

    What belongs to a batch as a whole is taken from the first.

    Raises:
        RuntimeError: tensors that differ beyond their first dimension.
    """
    first, count = batches[0], count_rows(batches[0])
    if len(batches) == 1:
        return first
    parts = [iter(_list_columns(batch)) for batch in batches]

    def join(node: Any) -> Any:
        members = [next(part) for part in parts]
        if isinstance(node, Tensor):
            return torch.cat(members) if node.ndim and node.shape[0] == count else node
        if is_object_column(node) and len(node) == count:
            return type(node)(member for column in members for member in column)
        return node

    return map_leaves(join, first, is_leaf=is_object_column)


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


def _list_columns(batch: Any) -> list[Any]:
    columns: list[Any] = []
    map_leaves(columns.append, batch, is_leaf=is_object_column)
    return columns


def _object_columns(batch: Any) -> list[Any]:
    return [node for node in _list_columns(batch) if is_object_column(node)]
