"""The tensors of a module: list them, move them between devices, and allocate memory for tensors on the meta device.

Also `Fragment`, the unit that checkpoints store: this process's piece of an unpartitioned tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from zero_plugin.errors import CheckpointError

WEIGHT: Final = "weight"
MASTER_WEIGHT: Final = "master"

NAMES_ALONE: Final[ContextVar[bool]] = ContextVar("names_alone", default=False)
"""Whether a caller reads a state dict only for its names, so its tensors may be partitions."""


@contextmanager
def reading_names() -> Iterator[None]:
    """Allow `state_dict` of a partitioned module inside the context: PEFT reads the names in it to find adapters."""
    token = NAMES_ALONE.set(True)
    try:
        yield
    finally:
        NAMES_ALONE.reset(token)


def as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Return the dtype of a name such as `bfloat16` or `torch.bfloat16`.

    Raises:
        AttributeError, ValueError: no dtype has this name.
    """
    found = getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch.{dtype} is no dtype")
    return found


def dtype_byte_size(dtype: torch.dtype) -> int:
    """Return the bytes of one element."""
    return dtype.itemsize


def as_pretrained(module: nn.Module) -> Any:
    """Return the module if it is a transformers model, or None. Does not import transformers."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return module if modeling is not None and isinstance(module, modeling.PreTrainedModel) else None


def names_of(module: nn.Module, parameters: Iterable[Tensor]) -> list[str]:
    """Return the parameters' names in the module, for a message; the script may have replaced some parameters."""
    names = {id(p): name for name, p in module.named_parameters()}
    return [names.get(id(p), "a parameter replaced since prepare()") for p in parameters]


class Slot(NamedTuple):
    """One place in a module that holds a tensor.

    Attributes:
        name: the dotted name, as in `named_parameters` of the outermost module.
        owner: the module that holds the tensor directly.
        key: the tensor's name in `owner`.
        is_buffer: whether the tensor is a buffer, not a parameter.
        is_persistent: whether the tensor is in the state dict.
    """

    name: str
    owner: nn.Module
    key: str
    is_buffer: bool
    is_persistent: bool

    @property
    def tensor(self) -> Tensor:
        """The current tensor."""
        held = (self.owner._buffers if self.is_buffer else self.owner._parameters)[self.key]
        assert held is not None
        return held

    @tensor.setter
    def tensor(self, tensor: Tensor) -> None:
        setattr(self.owner, self.key, tensor)  # not into `_parameters`: an LSTM also keeps its weights in a list


def tensor_slots(module: nn.Module, *, recurse: bool) -> Iterator[Slot]:
    """Iterate over a module's slots, with `recurse` also over its submodules'; a shared tensor has several slots."""
    for prefix, owner in module.named_modules() if recurse else [("", module)]:
        for is_buffer, held in ((False, owner._parameters), (True, owner._buffers)):
            for key in (key for key, tensor in held.items() if tensor is not None):
                is_persistent = key not in owner._non_persistent_buffers_set
                yield Slot(f"{prefix}.{key}".lstrip("."), owner, key, is_buffer, is_persistent)


def parameter_like(old: nn.Parameter, data: Tensor, *, requires_grad: bool | None = None) -> nn.Parameter:
    """Return a parameter with new data and the old parameter's class, attributes and, by default, `requires_grad`."""
    wants_grad = old.requires_grad if requires_grad is None else requires_grad
    new: nn.Parameter = torch.Tensor._make_subclass(type(old), data.detach(), wants_grad)
    new.__dict__.update(old.__dict__)
    return new


class SharedTensors:
    """A mover of tensors that copies a shared tensor to each device only once, while any module holds the copy."""

    def __init__(self) -> None:
        self._live: WeakValueDictionary[tuple[int, torch.device, bool], Tensor] = WeakValueDictionary()

    def move(
        self,
        tensor: Tensor,
        device: torch.device,
        value: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        copy: bool = False,
        trainable: bool = True,
    ) -> Tensor:
        """Return the tensor on a device.

        Args:
            tensor: a module's tensor. The module holds it until it gets the result.
            device: the target.
            value: the values. Required for a tensor on the meta device, unless an earlier call gave them.
            dtype: default: the tensor's.
            copy: copy into new memory instead of sharing `value`'s memory.
            trainable: keep `requires_grad` of a parameter; False clears it.

        Raises:
            ValueError: the tensor is on the meta device, and `value` is None.
        """
        dtype = tensor.dtype if dtype is None else dtype
        if value is None and tensor.device == device and tensor.dtype == dtype:
            return tensor
        key = (id(tensor), device, trainable)
        known = self._live.get(key)
        if known is not None:
            return known
        if value is None and tensor.is_meta and device.type != "meta":
            raise ValueError("a tensor on the meta device has no values")
        data = (tensor if value is None else value).detach().to(device, dtype, copy=copy)
        new = data
        if isinstance(tensor, nn.Parameter):
            new = parameter_like(tensor, data, requires_grad=tensor.requires_grad and trainable)
        self._live[key] = new
        return new


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the names and tensors of a module: first parameters, then buffers.

    Args:
        module: the module.
        include_buffers: include buffers.
        recurse: include submodules.
        remove_non_persistent: skip buffers that `state_dict` leaves out.
    """
    yield from module.named_parameters(recurse=recurse)
    if include_buffers:
        slots = tensor_slots(module, recurse=recurse) if remove_non_persistent else ()
        left_out = {slot.name for slot in slots if not slot.is_persistent}
        yield from ((name, buffer) for name, buffer in module.named_buffers(recurse=recurse) if name not in left_out)


def find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """Return, for each parameter with several names, its sorted names."""
    shared = (names for names, tensor in tensor_names(model) if isinstance(tensor, nn.Parameter) and len(names) > 1)
    return [sorted(names) for names in shared]


def retie_parameters(model: nn.Module, tied_params: list[list[str]]) -> None:
    """Tie each group of names again, to the group's first parameter that has values.

    Args:
        model: the model.
        tied_params: an earlier result of `find_tied_parameters`.
    """
    for group in tied_params:
        held = [model.get_parameter(name) for name in group]
        kept = next((parameter for parameter in held if not parameter.is_meta), None)
        if kept is not None:
            for name in group:
                path, _, key = name.rpartition(".")
                setattr(model.get_submodule(path), key, kept)


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: int | str | torch.device,
    value: Tensor | None = None,
    dtype: torch.dtype | str | None = None,
    *,
    non_blocking: bool = False,
    tied_params_map: Any = None,  # noqa: ARG001
) -> None:
    """Move one parameter or buffer to a device, optionally with new values.

    Args:
        module: the module.
        tensor_name: the tensor's dotted name in the module.
        device: the target.
        value: new values. Required for a tensor on the meta device.
        dtype: new dtype, used only for floating-point values. Default: the tensor's own.
        non_blocking: do not wait for a copy from pinned memory.
        tied_params_map: no effect; Accelerate's scripts may pass it. Call `retie_parameters` to tie parameters again.

    Raises:
        ValueError: the module has no tensor of this name, no values are available, or they have another shape.
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
    if dtype is None or new.dtype.is_floating_point:
        new = new.to(old.dtype if dtype is None else as_dtype(dtype))
    new = new.to(device, non_blocking=non_blocking)
    if name in owner._buffers:
        owner._buffers[name] = new
    elif value is not None or (new.device, new.dtype) != (old.device, old.dtype):
        setattr(owner, name, nn.Parameter(new, requires_grad=old.requires_grad))


def tensor_names(module: nn.Module) -> list[tuple[list[str], Tensor]]:
    """List parameters and persistent buffers, each once with all of its names, in the order of `state_dict`."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    # Do not use `Slot.tensor` here: it reads `_parameters[key]`, and during a forward ZeRO-3 gathers a parameter on
    # this read.
    for prefix, child in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        buffers = child.named_buffers(recurse=False, remove_duplicate=False)
        persistent = (entry for entry in buffers if entry[0] not in child._non_persistent_buffers_set)
        for name, tensor in chain(child.named_parameters(recurse=False, remove_duplicate=False), persistent):
            found.setdefault(id(tensor), ([], tensor))[0].append(dot + name)
    return list(found.values())


def shared_names(module: nn.Module) -> dict[str, str]:
    """Map each further name of a shared (tied) tensor to the tensor's first name, in the order of `state_dict`."""
    return {further: names[0] for names, _ in tensor_names(module) for further in names[1:]}


def persistent_tensors(module: nn.Module, only: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Iterate over parameters and persistent buffers by name, optionally `only` some; shared tensors come once."""
    for names, tensor in tensor_names(module):
        wanted = names if only is None else [name for name in names if name in only]
        if wanted:
            yield wanted[0], tensor


def allocate_unpartitioned(module: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Allocate memory for every tensor that is on the meta device.

    Args:
        module: the module.
        device: the device of the new tensors.
        dtype: dtype of floating-point parameters; None keeps their own.
    """

    def make(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            return torch.empty_like(tensor, device=device)
        kept = dtype if tensor.is_floating_point() else None
        return parameter_like(tensor, torch.empty_like(tensor, device=device, dtype=kept))

    replace_empty(module, make)


def replace_empty(module: nn.Module, make: Callable[[Tensor], Tensor]) -> None:
    """Replace each tensor on the meta device by `make(tensor)`. Shared tensors stay shared."""
    made: dict[int, tuple[Tensor, Tensor]] = {}  # id → (old, new); Python cannot reuse the id while `old` is held
    for slot in tensor_slots(module, recurse=True):
        old = slot.tensor
        if old.is_meta:
            if id(old) not in made:
                made[id(old)] = (old, make(old))
            slot.tensor = made[id(old)][1]


@dataclass(frozen=True, slots=True)
class Fragment:
    """A piece of one unpartitioned tensor, in this process's memory.

    Every process has a fragment of every stored tensor. The fragment is empty if the process holds no part of the
    tensor. A process may have several: under ZeRO, the module's and the optimizer's copy of a 32-bit weight.

    Attributes:
        kind: `weight` for parameters and buffers, `master` for 32-bit copies of 16-bit weights, or the optimizer's
            name of a state, e.g. `exp_avg`.
        name: name of the parameter or buffer in the user's module.
        shape: shape of the unpartitioned tensor.
        start: index of the first element of `values` in the flattened tensor.
        values: live memory that loading fills: flat, or an unpartitioned tensor in any memory format.
        written: the range of the flattened `values` that this process writes. All processes and fragments together
            write each element of the tensor once.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    start: int
    values: Tensor
    written: tuple[int, int]

    @property
    def is_elsewhere(self) -> bool:
        """Whether the values to write are on disk (NVMe) and not in this process's memory."""
        return self.values.numel() < self.written[1]

    def part_to_write(self) -> Tensor:
        """Return the flat part of the values that this process writes.

        Raises:
            CheckpointError: the part is not in memory.
        """
        if self.is_elsewhere:
            raise CheckpointError(f"{self.name} ({self.kind}) is not in memory, and nothing brings it there.")
        begin, end = self.written
        return self.values.reshape(-1)[begin:end]


def partition_of(count: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the range of `count` elements that a process writes if all processes hold the same elements."""
    return count * rank // world_size, count * (rank + 1) // world_size


def unpartitioned_fragment(name: str, tensor: Tensor, rank: int, world_size: int) -> Fragment:
    """Return the fragment of a weight or buffer that every process holds unpartitioned.

    The processes share the writing of a parameter. Buffers, e.g. running statistics, may differ between processes.
    Only rank 0 writes them, so a stored buffer never mixes values of several processes.
    """
    is_parameter = isinstance(tensor, nn.Parameter)
    written = partition_of(tensor.numel(), rank, world_size) if is_parameter else (0, 0 if rank else tensor.numel())
    return Fragment(WEIGHT, name, tuple(tensor.shape), 0, tensor.detach(), written)


def with_master_weights(weights: Iterable[Fragment], stepped: Iterable[Fragment]) -> Iterator[Fragment]:
    """Combine the module's weights with the optimizer's copies, so each is stored once.

    If both have the same dtype, the optimizer's copy is stored as the weight, because training resumes from this copy.
    The module's own memory is then only filled on loading.

    Args:
        weights: the module's weights. A weight that is not in memory is computed from its master weight, as a step
            does.
        stepped: the tensors that the optimizer steps, e.g. fp32 master weights, of kind `weight`. Tensors that are no
            weights of the module count as master weights.
    """
    copies = {copy.name: copy for copy in stepped}
    for weight in weights:
        copy = copies.pop(weight.name, None)
        if copy is None:
            yield weight
        elif copy.values.dtype != weight.values.dtype:
            is_elsewhere = copy.values.numel() and not weight.values.numel()  # the weight is on disk (NVMe)
            yield replace(copy, values=copy.values.to(weight.values.dtype)) if is_elsewhere else weight
            yield replace(copy, kind=MASTER_WEIGHT)
        else:
            if copy.values.data_ptr() != weight.values.data_ptr():
                yield replace(weight, written=(0, 0))
            yield copy
    for copy in copies.values():
        yield replace(copy, kind=MASTER_WEIGHT)
