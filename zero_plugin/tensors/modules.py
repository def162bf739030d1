"""The tensors of a module: by name, by the module that holds them, and their moves between devices.

Also memory for what a process keeps of a model that was built without, and what a checkpoint stores of a model:
unpartitioned tensors by name, each as the fragment that is in this process.
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
"""Whether a state dict is read for its names alone, so that its tensors may be partitions."""


@contextmanager
def reading_names() -> Iterator[None]:
    """Inside, `state_dict` of a partitioned module is no error: PEFT reads the names of modules beside its adapters."""
    token = NAMES_ALONE.set(True)
    try:
        yield
    finally:
        NAMES_ALONE.reset(token)


def as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """The type that `bfloat16` or `torch.bfloat16` names.

    Raises:
        AttributeError, ValueError: it names none.
    """
    found = getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch.{dtype} is no dtype")
    return found


def dtype_byte_size(dtype: torch.dtype) -> int:
    """Bytes of one element."""
    return dtype.itemsize


def as_pretrained(module: nn.Module) -> Any:
    """The module if it is a transformers model, else None; transformers is not imported to know."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return module if modeling is not None and isinstance(module, modeling.PreTrainedModel) else None


def names_of(module: nn.Module, parameters: Iterable[Tensor]) -> list[str]:
    """The names of parameters of a module, for a message; the script may have replaced some of them meanwhile."""
    names = {id(p): name for name, p in module.named_parameters()}
    return [names.get(id(p), "a parameter replaced since prepare()") for p in parameters]


class Slot(NamedTuple):
    """One place in a module that holds a tensor.

    Attributes:
        name: the dotted name, as in `named_parameters` of the outermost module.
        owner: the module that holds the tensor itself.
        key: the tensor's name in `owner`.
        is_buffer: whether it is a buffer, not a parameter.
        is_persistent: whether it is in the state dict.
    """

    name: str
    owner: nn.Module
    key: str
    is_buffer: bool
    is_persistent: bool

    @property
    def tensor(self) -> Tensor:
        """What is there now."""
        held = (self.owner._buffers if self.is_buffer else self.owner._parameters)[self.key]
        assert held is not None
        return held

    @tensor.setter
    def tensor(self, tensor: Tensor) -> None:
        setattr(self.owner, self.key, tensor)  # not into the dict: an LSTM also keeps its weights in a list


def tensor_slots(module: nn.Module, *, recurse: bool) -> Iterator[Slot]:
    """Every place of a tensor in the module, with `recurse` also in its submodules; a shared tensor has several."""
    for prefix, owner in module.named_modules() if recurse else [("", module)]:
        for is_buffer, held in ((False, owner._parameters), (True, owner._buffers)):
            for key in (key for key, tensor in held.items() if tensor is not None):
                is_persistent = key not in owner._non_persistent_buffers_set
                yield Slot(f"{prefix}.{key}".lstrip("."), owner, key, is_buffer, is_persistent)


def parameter_like(old: nn.Parameter, data: Tensor, *, requires_grad: bool | None = None) -> nn.Parameter:
    """A parameter with other data: of the old one's class, with its attributes, and its `requires_grad` by default."""
    wants_grad = old.requires_grad if requires_grad is None else requires_grad
    new: nn.Parameter = torch.Tensor._make_subclass(type(old), data.detach(), wants_grad)
    new.__dict__.update(old.__dict__)
    return new


class SharedTensors:
    """Moves tensors such that one that several modules hold is once on each device, as long as one of them holds it."""

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
        """The tensor as it is on a device.

        Args:
            tensor: as a module holds it, and holds it until its successor is there.
            device: where to.
            value: its values; needed where it is on the meta device, and not where a former call gave them.
            dtype: by default the tensor's.
            copy: in memory of its own, not in `value`'s.
            trainable: a parameter requires gradients if it did; otherwise it does not.

        Raises:
            ValueError: it has no values.
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
    """Parameters, then buffers, by name.

    Args:
        module: whose.
        include_buffers: also buffers.
        recurse: also those of modules inside.
        remove_non_persistent: without buffers that `state_dict` leaves out.
    """
    yield from module.named_parameters(recurse=recurse)
    if include_buffers:
        slots = tensor_slots(module, recurse=recurse) if remove_non_persistent else ()
        left_out = {slot.name for slot in slots if not slot.is_persistent}
        yield from ((name, buffer) for name, buffer in module.named_buffers(recurse=recurse) if name not in left_out)


def find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several, sorted."""
    shared = (names for names, tensor in tensor_names(model) if isinstance(tensor, nn.Parameter) and len(names) > 1)
    return [sorted(names) for names in shared]


def retie_parameters(model: nn.Module, tied_params: list[list[str]]) -> None:
    """Make each group of names one parameter again: the first of the group that has values.

    Args:
        model: that holds them.
        tied_params: as `find_tied_parameters` gave them before.
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
    """Put one parameter or buffer on a device, with other values where given.

    Args:
        module: that holds it, or holds a module that does.
        tensor_name: its dotted name.
        device: where to.
        value: its values; needed where it is on the meta device.
        dtype: type of a floating `value`, or of the tensor if it is floating; by default the tensor's own.
        non_blocking: do not wait for a copy out of pinned memory.
        tied_params_map: no effect, for scripts that give it: `retie_parameters` joins what was tied.

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
    if dtype is None or new.dtype.is_floating_point:
        new = new.to(old.dtype if dtype is None else as_dtype(dtype))
    new = new.to(device, non_blocking=non_blocking)
    if name in owner._buffers:
        owner._buffers[name] = new
    elif value is not None or (new.device, new.dtype) != (old.device, old.dtype):
        setattr(owner, name, nn.Parameter(new, requires_grad=old.requires_grad))


def tensor_names(module: nn.Module) -> list[tuple[list[str], Tensor]]:
    """Parameters and persistent buffers, each once, with all of its names in the order of `state_dict`."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    # `Slot.tensor` is not used here: it reads `_parameters[key]`, and inside a forward ZeRO-3 gathers a parameter that
    # is read by its key.
    for prefix, child in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        buffers = child.named_buffers(recurse=False, remove_duplicate=False)
        persistent = (entry for entry in buffers if entry[0] not in child._non_persistent_buffers_set)
        for name, tensor in chain(child.named_parameters(recurse=False, remove_duplicate=False), persistent):
            found.setdefault(id(tensor), ([], tensor))[0].append(dot + name)
    return list(found.values())


def shared_names(module: nn.Module) -> dict[str, str]:
    """Each further name of a shared (tied) tensor → the first name of that tensor, as `state_dict` would list them."""
    return {further: names[0] for names, _ in tensor_names(module) for further in names[1:]}


def persistent_tensors(module: nn.Module, only: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers by name, each shared tensor under its first name only; only some if named."""
    for names, tensor in tensor_names(module):
        wanted = names if only is None else [name for name in names if name in only]
        if wanted:
            yield wanted[0], tensor


def allocate_unpartitioned(module: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Memory for all of every tensor that is on the meta device.

    Args:
        module: any.
        device: where it is from now on.
        dtype: of floating parameters; None for their own.
    """

    def make(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            return torch.empty_like(tensor, device=device)
        kept = dtype if tensor.is_floating_point() else None
        return parameter_like(tensor, torch.empty_like(tensor, device=device, dtype=kept))

    replace_empty(module, make)


def replace_empty(module: nn.Module, make: Callable[[Tensor], Tensor]) -> None:
    """Put what `make` makes of it in the place of every tensor on the meta device; one that is shared stays so."""
    made: dict[int, tuple[Tensor, Tensor]] = {}  # with the old one, so that its id stays its own
    for slot in tensor_slots(module, recurse=True):
        old = slot.tensor
        if old.is_meta:
            if id(old) not in made:
                made[id(old)] = (old, make(old))
            slot.tensor = made[id(old)][1]


@dataclass(frozen=True, slots=True)
class Fragment:
    """A piece of one unpartitioned tensor, in this process' memory.

    Every process has a fragment of every tensor that is stored, an empty one where it holds nothing of it. It may have
    several: of a 32-bit weight under ZeRO the module's copy, and the optimizer's.

    Attributes:
        kind: `weight` for parameters and buffers, `master` for 32-bit copies of 16-bit weights, else the optimizer's
            own name of a state, e.g. `exp_avg`.
        name: of the parameter or buffer in the user's module.
        shape: of the unpartitioned tensor.
        start: where `values` begin in the flattened tensor, in elements.
        values: live memory, which reading fills: flat, or an unpartitioned tensor in any memory format.
        written: the range of the flattened `values` that this process writes. Over all processes and fragments each
            element of the tensor is written once.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    start: int
    values: Tensor
    written: tuple[int, int]

    @property
    def is_elsewhere(self) -> bool:
        """Whether what this process is to write is on a disk (NVMe), where no fragment reaches."""
        return self.values.numel() < self.written[1]

    def part_to_write(self) -> Tensor:
        """What of the values this process writes, flat.

        Raises:
            CheckpointError: it is not in memory.
        """
        if self.is_elsewhere:
            raise CheckpointError(f"{self.name} ({self.kind}) is not in memory, and nothing brings it there.")
        begin, end = self.written
        return self.values.reshape(-1)[begin:end]


def partition_of(count: int, rank: int, world_size: int) -> tuple[int, int]:
    """The range of `count` equal elements that falls to a process where all hold the same."""
    return count * rank // world_size, count * (rank + 1) // world_size


def unpartitioned_fragment(name: str, tensor: Tensor, rank: int, world_size: int) -> Fragment:
    """The fragment of a weight or buffer that every process holds unpartitioned.

    Processes share the writing of a parameter. A buffer (running statistics, say) may differ between them, and must
    not become a patchwork: the first process' is stored.
    """
    is_parameter = isinstance(tensor, nn.Parameter)
    written = partition_of(tensor.numel(), rank, world_size) if is_parameter else (0, 0 if rank else tensor.numel())
    return Fragment(WEIGHT, name, tuple(tensor.shape), 0, tensor.detach(), written)


def with_master_weights(weights: Iterable[Fragment], stepped: Iterable[Fragment]) -> Iterator[Fragment]:
    """Weights and the optimizer's copies of them, each stored once.

    Of the same type, the optimizer's copy is the weight: training resumes from it, so it is what is written.
    The module's, where that is other memory, is only read.

    Args:
        weights: of the module; one that is not in memory follows from its master weight, as after a step.
        stepped: the fp32 master weights, or whatever the optimizer steps, of kind `weight`. One that is no weight of
            the module is a master weight anyway.
    """
    copies = {copy.name: copy for copy in stepped}
    for weight in weights:
        copy = copies.pop(weight.name, None)
        if copy is None:
            yield weight
        elif copy.values.dtype != weight.values.dtype:
            is_elsewhere = copy.values.numel() and not weight.values.numel()  # on a disk, where no fragment reaches
            yield replace(copy, values=copy.values.to(weight.values.dtype)) if is_elsewhere else weight
            yield replace(copy, kind=MASTER_WEIGHT)
        else:
            if copy.values.data_ptr() != weight.values.data_ptr():
                yield replace(weight, written=(0, 0))
            yield copy
    for copy in copies.values():
        yield replace(copy, kind=MASTER_WEIGHT)
