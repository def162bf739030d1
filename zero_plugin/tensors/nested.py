"""Walk the nested containers that batches and metrics come in."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor


def _only_plain_leaves(_: Any) -> bool:
    return False


def map_leaves(function: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool] = _only_plain_leaves) -> Any:
    """The same containers with `function(leaf)` in place of every leaf.

    Dicts and dict-likes (also transformers' `BatchEncoding`), lists, tuples, named tuples and dataclasses are
    containers and keep their type, unless `is_leaf` says that one is not to be opened; everything else, strings too, is
    a leaf.
    """
    if is_leaf(tree):
        return function(tree)
    if isinstance(tree, MutableMapping):
        mapped = copy.copy(tree)  # keeps a defaultdict's factory and a BatchEncoding's other attributes
        for key, value in tree.items():
            mapped[key] = map_leaves(function, value, is_leaf)
        return mapped
    if isinstance(tree, Mapping):
        return type(tree)({key: map_leaves(function, value, is_leaf) for key, value in tree.items()})  # type: ignore[call-arg]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_leaves(function, value, is_leaf) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_leaves(function, value, is_leaf) for value in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in dataclasses.fields(tree) if field.init]
        return dataclasses.replace(tree, **{name: map_leaves(function, getattr(tree, name), is_leaf) for name in names})
    return function(tree)


def list_leaves(tree: Any, is_leaf: Callable[[Any], bool] = _only_plain_leaves) -> list[Any]:
    """Every leaf, in the order in which `map_leaves` meets them."""
    leaves: list[Any] = []
    map_leaves(leaves.append, tree, is_leaf)
    return leaves


def to_fp32(leaf: Any) -> Any:
    """A 16-bit tensor in fp32, anything else as it is: so a model returns the same type in every precision."""
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in (torch.float16, torch.bfloat16) else leaf
