"""The tensors of a module under the names that a checkpoint gives them."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import nn

__all__ = ["persistent_tensors", "shared_names"]


def shared_names(module: nn.Module) -> dict[str, str]:
    """Each further name of a shared (tied) tensor → the first name of that tensor, as `state_dict` would list them."""
    first: dict[int, str] = {}
    shared: dict[str, str] = {}
    for name, tensor in _all_tensors(module):
        if id(tensor) in first:
            shared[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
    return shared


def persistent_tensors(module: nn.Module, only: Collection[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers by name, each shared tensor under its first name only; only some if named."""
    seen: set[int] = set()
    for name, tensor in _all_tensors(module):
        if id(tensor) not in seen and (only is None or name in only):
            seen.add(id(tensor))
            yield name, tensor


def _all_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, child in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, parameter in child.named_parameters(recurse=False, remove_duplicate=False):
            yield dot + name, parameter
        for name, buffer in child.named_buffers(recurse=False, remove_duplicate=False):
            if name not in child._non_persistent_buffers_set:
                yield dot + name, buffer
