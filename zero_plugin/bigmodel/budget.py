"""How many bytes each device, and the host, may take of a model."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Final, TypeAlias

import torch
from torch import nn

from zero_plugin.bigmodel.sizes import compute_module_sizes, convert_file_size_to_int
from zero_plugin.errors import MachineError
from zero_plugin.meter import memory_available_bytes

__all__ = ["Budget", "get_balanced_memory", "get_max_memory", "unsplit_classes"]

Budget: TypeAlias = dict[int | str, int]

_logger = logging.getLogger(__name__)

_HOST: Final = ("mps", "cpu", "disk")  # places beside GPU indices, in the order in which they are filled

# Of a single GPU's memory, or the host's, that nobody has put a limit on, what the weights may take; the rest is for
# activations.
_WEIGHTS_OF_ONE: Final = 0.9

# How much more than its equal part a GPU may take, in largest layers, so that whole layers find room.
_LAYERS_OF_SLACK: Final = 1.25


def get_max_memory(max_memory: Mapping[int | str, int | str] | None = None) -> Budget:
    """Bytes by place, in the order in which places are filled: GPUs, `mps`, `cpu`, `disk`.

    Args:
        max_memory: limits by GPU index, `mps`, `cpu` or `disk`, as numbers of bytes or as texts such as `10GiB`; by
            default what is free now. A GPU that this machine has not is a warning, so that one can plan for another.

    Raises:
        ValueError: there is no such place, or a limit is no size.
        MachineError: how much is free is not known here.
    """
    if max_memory is None:
        return _free_memory()
    if unknown := [place for place in max_memory if not isinstance(place, int) and place not in _HOST]:
        raise ValueError(f"max_memory has {unknown[0]!r}; places are GPU indices (0, 1, …), 'mps', 'cpu' and 'disk'")
    gpus = sorted(place for place in max_memory if isinstance(place, int))
    here = torch.cuda.device_count()
    for index in gpus:
        if not 0 <= index < here:
            _logger.warning(f"max_memory has GPU {index}, which is not available here; there are {list(range(here))}.")
    places = [*gpus, *(place for place in _HOST if place in max_memory)]
    return {place: convert_file_size_to_int(max_memory[place]) for place in places}


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: Collection[str] | None = None,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Mapping[str, torch.dtype | str] | None = None,
    low_zero: bool = False,
) -> Budget:
    """Limits, in bytes, with which `infer_auto_device_map` gives all GPUs about equally much.

    Every GPU but the last may take an equal part of the model, and 1.25 of the larger of: a module that is not to be
    split, a mean layer. The last one keeps its limit, so that rounding sends nothing to the host.

    Args:
        model: may be on the meta device.
        max_memory: as for `get_max_memory`; a GPU with 0 takes no part. By default 90 % of a single
            GPU, and of the host where there is none.
        no_split_module_classes: names of the classes that are not to be split; by default transformers' own.
        dtype: as for `compute_module_sizes`.
        special_dtypes: as for `compute_module_sizes`.
        low_zero: leave on the first GPU only what the others cannot take; for `generate`, which works there.
    """
    limits = get_max_memory(max_memory)
    gpus = [place for place, limit in limits.items() if isinstance(place, int) and limit > 0]
    if len(gpus) < 2 and max_memory is None:
        only = next(iter(limits))  # the GPU, or the host where there is none
        limits[only] = int(limits[only] * _WEIGHTS_OF_ONE)
    if len(gpus) < 2:
        return limits
    sizes = compute_module_sizes(model, dtype=dtype, special_dtypes=special_dtypes)
    whole = unsplit_classes(model, no_split_module_classes)
    modules = [(name, module) for name, module in model.named_modules() if name in sizes and name]
    layers = [sizes[name] for name, module in modules if not any(True for _ in module.children())]
    unsplit = [sizes[name] for name, module in modules if type(module).__name__ in whole]
    slack = int(_LAYERS_OF_SLACK * max([*unsplit, sum(layers) // max(len(layers), 1)]))
    part = sizes[""] // (len(gpus) - low_zero) + slack
    first, *others = gpus
    for gpu in others[:-1] if low_zero else gpus[:-1]:
        limits[gpu] = min(limits[gpu], part)
    if low_zero:
        limits[first] = min(limits[first], max(0, sizes[""] - sum(limits[gpu] for gpu in others)))
    return limits


def unsplit_classes(model: nn.Module, given: Collection[str] | str | None) -> frozenset[str]:
    """Names of the classes whose modules stay on one device: those given, else those that transformers knows of."""
    if given is None:
        given = getattr(model, "_no_split_modules", None) or ()
    return frozenset([given] if isinstance(given, str) else given)


def _free_memory() -> Budget:
    limits: Budget = {}
    for index in range(torch.cuda.device_count()):
        limits[index] = memory_available_bytes(torch.device("cuda", index)) or 0
    host = memory_available_bytes(torch.device("cpu"))
    if host is None:
        raise MachineError(
            "how much memory is free cannot be found out on this system.\nWrite it: max_memory={'cpu': '16GB'}."
        )
    limits["mps" if torch.backends.mps.is_available() else "cpu"] = host
    return limits
