"""Names, sizes and places of a model's tensors."""

from __future__ import annotations

import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zero_plugin.checkpoint.objects import tensor_storage as id_tensor_storage
from zero_plugin.unwrapping import extract_model

__all__ = [
    "check_device_map",
    "compute_module_sizes",
    "convert_file_size_to_int",
    "dtype_byte_size",
    "find_tied_parameters",
    "id_tensor_storage",
    "is_peft_model",
    "named_module_tensors",
    "set_module_tensor_to_device",
]

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


def dtype_byte_size(dtype: torch.dtype) -> int:
    """Bytes of one element."""
    return dtype.itemsize


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then buffers, by name.

    Args:
        module: whose.
        include_buffers: also buffers.
        recurse: also those of modules inside.
        remove_non_persistent: without buffers that `state_dict` leaves out.
    """
    yield from module.named_parameters(recurse=recurse)
    if include_buffers:
        passing = {
            f"{prefix}.{name}".lstrip(".")
            for prefix, part in (module.named_modules() if recurse else [("", module)])
            for name in part._non_persistent_buffers_set
            if remove_non_persistent
        }
        yield from ((name, buffer) for name, buffer in module.named_buffers(recurse=recurse) if name not in passing)


def find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several, sorted."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [sorted(tied) for tied in names.values() if len(tied) > 1]


def compute_module_sizes(
    model: nn.Module,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Mapping[str, torch.dtype | str] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Bytes of every parameter, buffer and module by name; the whole model's under the empty name.

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
            bytes_each = _as_dtype(special_dtypes[name]).itemsize
        elif dtype is not None and tensor.dtype.is_floating_point:
            bytes_each = min(bytes_each, _as_dtype(dtype).itemsize)
        parts = name.split(".")
        for depth in range(len(parts) + 1):
            sizes[".".join(parts[:depth])] += tensor.numel() * bytes_each
    return sizes


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: int | str | torch.device,
    value: Tensor | None = None,
    dtype: torch.dtype | str | None = None,
    non_blocking: bool = False,
) -> None:
    """Put one parameter or buffer on a device, with other values where given.

    Args:
        module: that holds it, or holds a module that does.
        tensor_name: its dotted name.
        device: where to.
        value: its values; needed where it is on the meta device.
        dtype: type of a floating `value`; by default the tensor's own.
        non_blocking: do not wait for a copy out of pinned memory.

    Raises:
        ValueError: there is no such tensor, it has no values, or they have another shape.
    """
    path, _, name = tensor_name.rpartition(".")
    owner = module.get_submodule(path)
    if name not in owner._parameters and name not in owner._buffers:
        raise ValueError(f"{type(owner).__name__} does not have a parameter or a buffer named {name}")
    old: Tensor = getattr(owner, name)
    if value is None and old.is_meta and torch.device(device).type != "meta":
        raise ValueError(f"{tensor_name} is on the meta device and has no values; pass value=")
    if value is not None and value.shape != old.shape:
        raise ValueError(f"{tensor_name} has shape {tuple(old.shape)}; the value has {tuple(value.shape)}")
    new = (old if value is None else value).detach()
    if value is not None and (dtype is None or value.dtype.is_floating_point):
        new = new.to(old.dtype if dtype is None else _as_dtype(dtype))
    new = new.to(device, non_blocking=non_blocking)
    if name in owner._buffers:
        owner._buffers[name] = new
    elif value is not None or new.device != old.device:
        owner._parameters[name] = nn.Parameter(new, requires_grad=old.requires_grad)


def check_device_map(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    """Check that a map from names of modules to devices has a place for every tensor of the model.

    A name that no module has is a warning.

    Raises:
        ValueError: some tensors have no place.
    """
    modules = dict(model.named_modules())
    if unknown := [name for name in device_map if name not in modules]:
        message = f"The following device_map keys do not match any submodules in the model: {unknown}"
        warnings.warn(message, stacklevel=2)
    inside = tuple(f"{name}." if name else "" for name in device_map)  # every name begins with the empty one
    left = [name for name in model.state_dict() if name not in device_map and not name.startswith(inside)]
    if left:
        message = "The device_map provided does not give any device for the following parameters: "
        raise ValueError(message + ", ".join(left))


def is_peft_model(model: nn.Module) -> bool:
    """Whether the model, without what wraps it, is PEFT's."""
    peft = sys.modules.get("peft")  # a model of PEFT's has imported it
    return peft is not None and isinstance(extract_model(model), peft.PeftModel)


def _as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    return found
