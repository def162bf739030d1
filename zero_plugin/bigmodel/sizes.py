"""How many bytes a model and its parts take, and how many a text such as `5GB` means."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from zero_plugin.bigmodel.tensors import as_dtype, named_module_tensors

__all__ = ["calculate_maximum_sizes", "compute_module_sizes", "convert_file_size_to_int", "get_max_layer_size"]

_SIZE = re.compile(r"(\d+\.?\d*|\.\d+)\s*([KMGTkmgt])([Ii]?)([Bb])")
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}


def convert_file_size_to_int(size: int | str) -> int:
    """Bytes in a number, or in a text such as `5GB` (decimal), `5GiB` (binary) or `5Gb` (decimal, of bits).

    Raises:
        ValueError: it is no size.
    """
    if isinstance(size, int) and size >= 0:
        return size
    if found := _SIZE.fullmatch(str(size)):
        number, prefix, binary, unit = found.groups()
        total = int(float(number) * (1024 if binary else 1000) ** _POWERS[prefix.upper()])
        return total // 8 if unit == "b" and not binary else total
    raise ValueError(f"{size!r} is no size; write a number of bytes, or a text such as '5GB' or '200MiB'")


def compute_module_sizes(
    model: nn.Module,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Mapping[str, torch.dtype | str] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Bytes of every parameter, buffer and module by name; the whole model's under the empty name.

    A tensor that has several names counts under the first of them.

    Args:
        model: may be on the meta device.
        dtype: the type that floating tensors will have; one that is smaller than that already keeps its size.
        special_dtypes: the type that the tensors of these names will have.
        buffers_only: without parameters.
    """
    sizes: dict[str, int] = defaultdict(int)
    tensors = model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True)
    for name, tensor in tensors:
        bytes_each = tensor.dtype.itemsize
        if special_dtypes is not None and name in special_dtypes:
            bytes_each = as_dtype(special_dtypes[name]).itemsize
        elif dtype is not None and tensor.dtype.is_floating_point:
            bytes_each = min(bytes_each, as_dtype(dtype).itemsize)
        parts = name.split(".")
        for depth in range(len(parts) + 1):
            sizes[".".join(parts[:depth])] += tensor.numel() * bytes_each
    return sizes


def get_max_layer_size(
    modules: Sequence[tuple[str, nn.Module | Tensor]],
    module_sizes: Mapping[str, int],
    no_split_module_classes: Collection[str],
) -> tuple[int, list[str]]:
    """Bytes of the largest layer, and the names of those that are as large.

    Args:
        modules: by name; a layer is a tensor, a module without modules inside, or one that is not to be split.
        module_sizes: from `compute_module_sizes`.
        no_split_module_classes: names of the classes that are not to be split.
    """
    layers: list[str] = []
    remaining = list(reversed(modules))
    while remaining:
        name, module = remaining.pop()
        inside = list(module.named_children()) if isinstance(module, nn.Module) else []
        if inside and type(module).__name__ not in no_split_module_classes:
            remaining.extend((f"{name}.{child}", part) for child, part in reversed(inside))
        else:
            layers.append(name)
    largest = max((module_sizes.get(name, 0) for name in layers), default=0)
    return largest, [name for name in layers if module_sizes.get(name, 0) == largest]


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Bytes of the model, and its largest layer as `get_max_layer_size` tells it."""
    sizes = compute_module_sizes(model)
    parts: list[tuple[str, nn.Module | Tensor]] = [*named_module_tensors(model), *model.named_children()]
    return sizes[""], get_max_layer_size(parts, sizes, getattr(model, "_no_split_modules", None) or ())
