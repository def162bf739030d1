"""Chooses the places of a model's parts: GPUs first, then CPU memory, then disk. Computes the parts' sizes in bytes."""

from __future__ import annotations

import logging
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from zero_plugin.config.amounts import read_bytes
from zero_plugin.distributed.messages import once
from zero_plugin.machine.hardware import available_cpu_memory, memory_available_bytes
from zero_plugin.tensors.modules import as_dtype, find_tied_parameters, named_module_tensors

Part: TypeAlias = tuple[str, nn.Module | Tensor]
Place: TypeAlias = int | str
Budget: TypeAlias = dict[Place, int]

_logger = logging.getLogger(__name__)

_HOST: Final = ("mps", "cpu", "disk")  # places other than GPU indices, in the order in which they are filled

# The share of the memory of a single GPU, or of the CPU, that weights may take if no limit is given. The rest is for
# activations.
_WEIGHTS_OF_ONE: Final = 0.9

# The excess over its equal part that a GPU may take, in sizes of the largest layer. It lets complete layers fit.
_LAYERS_OF_SLACK: Final = 1.25


def get_max_memory(max_memory: Mapping[int | str, int | str] | None = None) -> Budget:
    """Return the limit of each place in bytes, in the order in which places are filled: GPUs, `mps`, `cpu`, `disk`.

    Args:
        max_memory: limits by GPU index, `mps`, `cpu` or `disk`, as numbers of bytes or texts such as `10GiB`. By
            default the free memory. A GPU that this machine lacks only causes a warning, to allow plans for another
            machine.

    Raises:
        ValueError: a place has an unknown name, or a limit is not a size.
    """
    if max_memory is None:
        return _free_memory()
    if unknown := [place for place in max_memory if not isinstance(place, int) and place not in _HOST]:
        raise ValueError(f"max_memory has {unknown[0]!r}; places are GPU indices (0, 1, …), 'mps', 'cpu' and 'disk'")
    gpus = sorted(place for place in max_memory if isinstance(place, int))
    count = torch.cuda.device_count()
    here = f"its GPUs are 0 to {count - 1}" if count else "it has none"
    for index in gpus:
        if not 0 <= index < count and once(_logger, (index, count)):  # several functions read the same limits
            _logger.warning(f"max_memory has GPU {index}, which this machine does not have; {here}.")
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
    """Return limits in bytes with which `infer_auto_device_map` gives all GPUs about equal parts.

    Every GPU except the last may take an equal part of the model, plus 1.25 times the larger of two sizes: the largest
    unsplit module, and the mean layer. The last GPU keeps its limit, to prevent rounding from sending parts to the CPU.

    Args:
        model: the model, which may be on the meta device.
        max_memory: see `get_max_memory`; a GPU with 0 gets no part. By default 90 % of a single GPU, or of CPU memory
            without a GPU.
        no_split_module_classes: names of classes whose modules are not split; by default transformers' own list.
        dtype: see `compute_module_sizes`.
        special_dtypes: see `compute_module_sizes`.
        low_zero: give the first GPU only parts that the others cannot take. This leaves room for `generate` there.
    """
    limits = get_max_memory(max_memory)
    gpus = [place for place, limit in limits.items() if isinstance(place, int) and limit > 0]
    if len(gpus) < 2 and max_memory is None:
        only = next(iter(limits))  # the GPU, or CPU memory without a GPU
        limits[only] = int(limits[only] * _WEIGHTS_OF_ONE)
    if len(gpus) < 2:
        return limits
    sizes = compute_module_sizes(model, dtype=dtype, special_dtypes=special_dtypes)
    classes = unsplit_classes(model, no_split_module_classes)
    modules = [(name, module) for name, module in model.named_modules() if name in sizes and name]
    layers = [sizes[name] for name, module in modules if not any(True for _ in module.children())]
    unsplit = [sizes[name] for name, module in modules if type(module).__name__ in classes]
    slack = int(_LAYERS_OF_SLACK * max([*unsplit, sum(layers) // max(len(layers), 1)]))
    part = sizes[""] // (len(gpus) - low_zero) + slack
    first, *others = gpus
    for gpu in others[:-1] if low_zero else gpus[:-1]:
        limits[gpu] = min(limits[gpu], part)
    if low_zero:
        limits[first] = min(limits[first], max(0, sizes[""] - sum(limits[gpu] for gpu in others)))
    return limits


def unsplit_classes(model: nn.Module, given: Collection[str] | str | None) -> frozenset[str]:
    """Return names of classes whose modules stay on one device: `given`, or by default transformers' own list."""
    if given is None:
        given = getattr(model, "_no_split_modules", None) or ()
    return frozenset([given] if isinstance(given, str) else given)


def _free_memory() -> Budget:
    limits: Budget = {}
    for index in range(torch.cuda.device_count()):
        limits[index] = memory_available_bytes(torch.device("cuda", index))
    limits["mps" if torch.backends.mps.is_available() else "cpu"] = available_cpu_memory()
    return limits


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: Collection[str] | None = None,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Mapping[str, torch.dtype | str] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, Place]:
    """Fill the places one after another with the model's modules, in the model's order.

    A module that does not fit is divided, down to single tensors. Modules with tied weights go to one place. The first
    GPU, and the CPU, reserve memory for the largest layer that is not placed yet, because this layer may be loaded
    there for its forward.

    Args:
        model: the model, which may be on the meta device.
        max_memory: see `get_max_memory`; the disk has no limit.
        no_split_module_classes: names of classes whose modules are not divided (blocks with a residual connection); by
            default transformers' own list.
        dtype: the future dtype of floating tensors, see `compute_module_sizes`.
        special_dtypes: see `compute_module_sizes`.
        verbose: print each decision.
        clean_result: name a module instead of its parts if all parts go to one place.
        offload_buffers: buffers of modules that are not on a GPU stay with them. Otherwise they take memory of a GPU,
            with a warning if no GPU has enough.
        fallback_allocation: if the next module does not fit on an empty place, look for a later one that fits.

    Returns:
        Name of module, parameter or buffer → GPU index, `mps`, `cpu` or `disk`.
    """
    limits = get_max_memory(max_memory)
    filling = _Filling(model, limits, unsplit_classes(model, no_split_module_classes), dtype, special_dtypes)
    device_map = filling.fill(fallback_allocation, print if verbose else lambda _: None)
    if not offload_buffers:
        _warn_of_buffers(filling, compute_module_sizes(model, dtype, special_dtypes, buffers_only=True), device_map)
    return clean_device_map(device_map) if clean_result else device_map


class _Filling:
    """The parts of a model that are not placed yet, and the used memory of each place."""

    def __init__(
        self,
        model: nn.Module,
        limits: dict[Place, int],
        unsplit: frozenset[str],
        dtype: torch.dtype | str | None,
        special_dtypes: Mapping[str, torch.dtype | str] | None,
    ) -> None:
        self.sizes = compute_module_sizes(model, dtype, special_dtypes)
        self.limits = limits
        self.gpus = [place for place, limit in limits.items() if limit and place not in ("cpu", "disk")]
        self.used = dict.fromkeys([*limits, "disk"], 0)
        self._unsplit = unsplit
        self._tied = find_tied_parameters(model)
        self._queue = list(_inside("", model))
        self._layers: dict[str, int] = {}

    def fill(self, fallback: bool, log: Callable[[str], None]) -> dict[str, Place]:
        device_map: dict[str, Place] = {}
        places = [place for place in self.used if place != "disk"]
        # Parts in CPU memory or on disk run on the first GPU, or on the CPU without a GPU. A layer must fit there.
        running = next(iter(self.gpus), "cpu")
        while self._queue:
            place = places[0] if places else "disk"
            (name, part), *rest = self._queue
            keeps_room = place in (running, "cpu")
            reserved = max(map(self._largest_layer, rest), default=0) if keeps_room else 0
            reserved_otherwise = max(map(self._largest_layer, self._queue)) if keeps_room else 0
            free = math.inf if place == "disk" else self.limits[place] - self.used[place] - reserved
            partners = self._partners(name, rest)
            divisible = [*partners, (name, part)] if self.sizes[name] <= free else [(name, part)]
            size = sum(self.sizes[part_name] for part_name, _ in [(name, part), *partners])
            if size <= free:
                together = [name, *(partner for partner, _ in partners)]
                log(f"{' with '.join(together)} ({size} bytes) goes to {place}.")
                self.used[place] += size
                device_map |= dict.fromkeys(together, place)
                self._queue = [entry for entry in rest if entry[0] not in together]
            elif divided := next((entry for entry in divisible if self._is_divisible(entry[1])), None):
                log(f"{name} ({size} bytes) does not fit on {place}, where {free} are left; {divided[0]} is divided.")
                at = self._queue.index(divided)
                self._queue[at : at + 1] = _inside(*divided)
            elif (
                fallback
                and not self.used[place]
                and (found := self._find(rest, self.limits[place] - reserved_otherwise))
            ):
                log(f"{name} ({size} bytes) does not fit on {place}; {found[0]} does.")
                self._bring_forward(found)
            else:
                log(f"{name} ({size} bytes) does not fit on {place}, where {free} are left, and is not divided.")
                if not self.used[place]:
                    _logger.info(
                        f"Nothing goes to {place}: {name} and the memory for a layer need {size + reserved} bytes."
                    )
                self.used[place] += reserved
                places.pop(0)
        return device_map

    def _partners(self, name: str, parts: list[Part]) -> list[Part]:
        """Return the `parts` that hold a weight tied to a weight in `name`."""
        groups = [group for group in self._tied if any(_holds(name, known) for known in group)]
        tied = {other for group in groups for other in group if not _holds(name, other)}
        return [entry for entry in parts if any(_holds(entry[0], other) for other in tied)]

    def _largest_layer(self, entry: Part) -> int:
        if entry[0] not in self._layers:
            self._layers[entry[0]] = get_max_layer_size([entry], self.sizes, self._unsplit)[0]
        return self._layers[entry[0]]

    def _is_divisible(self, part: nn.Module | Tensor) -> bool:
        if not isinstance(part, nn.Module) or type(part).__name__ in self._unsplit:
            return False
        return any(True for _ in part.children())

    def _find(self, parts: list[Part], free: int) -> Part | None:
        """Return the first part, or part of a part, that fits."""
        for entry in parts:
            partners = self._partners(entry[0], self._queue)
            if self.sizes[entry[0]] + sum(self.sizes[name] for name, _ in partners) <= free:
                return entry
            if self._is_divisible(entry[1]) and (found := self._find(list(_inside(*entry)), free)):
                return found
        return None

    def _bring_forward(self, found: Part) -> None:
        """Move a part to the front of the queue. Divide the module that contains it."""
        while found[0] not in (names := [name for name, _ in self._queue]):
            at = next(i for i, name in enumerate(names) if _holds(name, found[0]))
            self._queue[at : at + 1] = _inside(*self._queue[at])
        self._queue.insert(0, self._queue.pop(names.index(found[0])))


def check_device_map(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    """Check that a map from names of modules to devices has a place for every tensor of the model.

    A name of no module or tensor causes a warning.

    Raises:
        ValueError: some tensors have no place.
    """
    names = {name for name, _ in model.named_modules(remove_duplicate=False)} | set(model.state_dict())
    names |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    if unknown := [name for name in device_map if name not in names]:
        message = f"The following device_map keys do not match any submodules in the model: {unknown}"
        warnings.warn(message, stacklevel=2)
    left = [name for name in model.state_dict() if lookup(device_map, name) is None]
    if left:
        message = "The device_map provided does not give any device for the following parameters: "
        raise ValueError(message + ", ".join(left))


def lookup(device_map: Mapping[str, Any], name: str) -> Any:
    """Return the map's value for a module or tensor, from the most specific entry that contains it, or None."""
    while name and name not in device_map:
        name = name.rpartition(".")[0]
    return device_map.get(name)


def clean_device_map(device_map: dict[str, Any], module_name: str = "") -> dict[str, Any]:
    """Name a module instead of its parts if all parts go to one place. The map itself is changed.

    Args:
        device_map: places by name.
        module_name: only change entries inside this module.
    """
    inside = [name for name in device_map if name != module_name and _holds(module_name, name)]
    if len(inside) > 1 and len({device_map[name] for name in inside}) == 1:
        place = device_map[inside[0]]
        entries = list(device_map.items())
        device_map.clear()
        device_map |= {module_name if name in inside else name: value for name, value in entries}
        device_map[module_name] = place
    elif len(inside) > 1:
        depth = len(module_name.split(".")) + 1 if module_name else 1
        for child in dict.fromkeys(".".join(name.split(".")[:depth]) for name in inside):
            clean_device_map(device_map, child)
    return device_map


def _inside(name: str, part: nn.Module | Tensor) -> Iterator[Part]:
    """Yield a module's direct parameters, buffers and submodules."""
    assert isinstance(part, nn.Module)
    prefix = f"{name}." if name else ""
    for held in (part._parameters, part._buffers, part._modules):  # all names, including those of shared entries
        yield from ((prefix + key, inner) for key, inner in held.items() if inner is not None)


def _holds(module_name: str, name: str) -> bool:
    return not module_name or name == module_name or name.startswith(f"{module_name}.")


def _warn_of_buffers(filling: _Filling, buffers: Mapping[str, int], device_map: Mapping[str, Place]) -> None:
    offloaded = sum(buffers.get(name, 0) for name, place in device_map.items() if place in ("cpu", "disk"))
    if not offloaded or not filling.gpus:
        return
    if all(filling.limits[gpu] < filling.used[gpu] + offloaded for gpu in filling.gpus):
        warnings.warn(
            f"Buffers of modules that are not on a GPU take {offloaded} bytes there, and no GPU has memory for them. "
            "Pass offload_buffers=True to leave them with their modules.",
            stacklevel=3,
        )


@lru_cache  # called at every forward of every module
def find_place(device: int | str | torch.device) -> torch.device:
    """Return the device of a GPU index or a name, with its index, like the `device` of tensors on it.

    Raises:
        ValueError: this machine has no such device.
    """
    try:
        place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        return torch.empty(0, device=place).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch's errors for different reasons
        here = torch.cuda.device_count()
        gpus = f"its GPUs are {list(range(here))}" if here else "it has no GPU"
        wanted = f"GPU {device}" if isinstance(device, int) else f"device {str(device)!r}"
        raise ValueError(f"this machine has no {wanted}: {gpus}; 'cpu' and 'disk' are there.") from error


def check_places(device_map: Mapping[str, int | str | torch.device]) -> None:
    """Check that this machine has every device in a map.

    Raises:
        ValueError: a device is missing; the message names the map's key.
    """
    for name, device in device_map.items():
        if device != "disk":
            try:
                find_place(device)
            except ValueError as error:
                raise ValueError(f"device_map sends {name or 'the model'!r} to {device!r}, but {error}") from error


def convert_file_size_to_int(size: int | str) -> int:
    """Convert a number, or a text such as `5GB` (decimal) or `5GiB` (binary), to bytes; see `read_bytes`.

    Raises:
        ValueError: the value is not a size. A text needs a unit.
    """
    found = read_bytes(size, least=0)
    if found is None or (isinstance(size, str) and size.strip().isdigit()):
        raise ValueError(f"{size!r} is no size; write a number of bytes, or a text such as '5GB' or '200MiB'")
    return found


def compute_module_sizes(
    model: nn.Module,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Mapping[str, torch.dtype | str] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Return the bytes of every parameter, buffer and module by name. The complete model has the empty name.

    A tensor with several names counts under the first name only.

    Args:
        model: the model, which may be on the meta device.
        dtype: the future dtype of floating tensors. A tensor with a smaller dtype keeps its size.
        special_dtypes: the future dtypes of the tensors with these names.
        buffers_only: count buffers only, not parameters.
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
    """Return the bytes of the largest layer, and the names of all layers of this size.

    Args:
        modules: names with modules or tensors. A layer is a tensor, a module without submodules, or an unsplit module.
        module_sizes: sizes from `compute_module_sizes`.
        no_split_module_classes: names of classes whose modules are not split.
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
    """Return the bytes of the model, and its largest layer as from `get_max_layer_size`."""
    sizes = compute_module_sizes(model)
    parts: list[tuple[str, nn.Module | Tensor]] = [*named_module_tensors(model), *model.named_children()]
    return sizes[""], get_max_layer_size(parts, sizes, getattr(model, "_no_split_modules", None) or ())
