"""A hook that brings a module's weights and inputs to one device for the forward, and which modules get one.

Also where each module of a model runs that is spread over devices, and where its tensors are between forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zero_plugin.big_models.hooks import ModelHook, SequentialHook, untraced
from zero_plugin.big_models.placement import find_place, lookup
from zero_plugin.big_models.stored import PrefixedDataset
from zero_plugin.tensors.modules import SharedTensors, Slot, tensor_slots
from zero_plugin.tensors.nested import find_device, send_to_device

_META = torch.device("meta")
# Their forward reads weights of modules inside without calling these.
_READS_INSIDE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


class AlignDevicesHook(ModelHook):
    """Weights and inputs are on `execution_device` in the forward.

    Offloaded weights are on the meta device between forwards. They come in, out of `weights_map`, when the forward
    begins, require no gradients, and leave when it ends or raises.

    Args:
        execution_device: where the forward runs; None leaves tensors where they are.
        offload: weights leave after the forward.
        io_same_device: the output goes to where the input was.
        weights_map: values of offloaded tensors by name, which may be read only when they are taken; what it does not
            have stays on the execution device. By default the module's own values, in CPU memory.
        offload_buffers: buffers of the state dict leave too; others stay on the execution device.
        place_submodules: the weights of modules inside, too.
        skip_keys: keyword arguments, and keys of outputs, that stay where they are.
        tied_params_map: what the hooks of one model share, so that a tied weight is in memory once.
    """

    def __init__(
        self,
        execution_device: int | str | torch.device | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | list[str] | None = None,
        tied_params_map: SharedTensors | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = SharedTensors() if tied_params_map is None else tied_params_map
        self.input_device: torch.device | None = None
        self.original_devices: dict[str, torch.device] = {}  # of offloaded tensors, by name
        self._inside: list[list[tuple[Slot, Tensor]]] = []  # for each running forward, what came in and what was there

    def __repr__(self) -> str:
        shown = ("execution_device", "offload", "io_same_device", "offload_buffers", "place_submodules", "skip_keys")
        return f"AlignDevicesHook({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Place what stays, and take out what is offloaded."""
        slots = list(tensor_slots(module, recurse=self.place_submodules))
        leaving = {slot.name: slot.tensor for slot in slots if self.offload and self._may_leave(slot)}
        if self.weights_map is None:
            self.weights_map = {name: tensor.to("cpu") for name, tensor in leaving.items()}
        for slot in slots:
            old = slot.tensor
            if slot.name in leaving and slot.name in self.weights_map:
                self.original_devices[slot.name] = old.device
                slot.tensor = self.tied_params_map.move(old, _META)
            elif self.execution_device is not None:
                slot.tensor = self._move(slot, old, find_place(self.execution_device))
        return module

    @untraced
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Bring the weights in, and the arguments to them."""
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        self._inside.append([])
        if self.offload:
            self._bring_in(module)
        if self.execution_device is None:
            return args, kwargs
        moved: tuple[tuple[Any, ...], dict[str, Any]] = (
            send_to_device(args, self.execution_device),
            send_to_device(kwargs, self.execution_device, skip_keys=self.skip_keys),
        )
        return moved

    @untraced
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Take the weights out, and the output to where the input was."""
        self.interrupted(module)
        if self.io_same_device and self.input_device is not None:
            return send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    @untraced
    def interrupted(self, module: nn.Module) -> None:  # noqa: ARG002
        """Take the weights out."""
        for slot, outside in self._inside.pop() if self._inside else ():
            slot.tensor = outside

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Give the module back what it held before the hook, where it held it."""
        for slot in tensor_slots(module, recurse=self.place_submodules):
            device = self.original_devices.get(slot.name, _META)
            if device != _META:
                assert self.weights_map is not None
                slot.tensor = self.tied_params_map.move(slot.tensor, device, self.weights_map[slot.name])
        return module

    def _may_leave(self, slot: Slot) -> bool:
        return slot.is_persistent and (self.offload_buffers or not slot.is_buffer)

    def _bring_in(self, module: nn.Module) -> None:
        if self.weights_map is None or self.execution_device is None:
            return
        device = find_place(self.execution_device)
        for slot in tensor_slots(module, recurse=self.place_submodules):
            outside = slot.tensor
            if slot.name in self.original_devices and outside.is_meta and device != _META:
                value = self.weights_map[slot.name]
                if value.shape != outside.shape:
                    raise ValueError(
                        f"{slot.name} of {type(slot.owner).__name__} has shape {tuple(outside.shape)}; the stored "
                        f"weight has {tuple(value.shape)}"
                    )
                slot.tensor = self.tied_params_map.move(outside, device, value, trainable=False)
                self._inside[-1].append((slot, outside))

    def _move(self, slot: Slot, old: Tensor, device: torch.device) -> Tensor:
        try:
            return self.tied_params_map.move(old, device)
        except ValueError as error:
            hint = "load its weights first" if slot.is_persistent else "build the model with include_buffers=False"
            raise ValueError(f"{slot.name} of {type(slot.owner).__name__}: {error}; {hint}") from error


def has_offloaded_params(module: nn.Module) -> bool:
    """Whether weights of the module itself leave after its forward."""
    return _offloading_hook(module) is not None


@contextmanager
def align_module_device(module: nn.Module, execution_device: int | str | torch.device | None = None) -> Iterator[None]:
    """Inside, the module's own parameters have values.

    Args:
        module: with a hook that offloads, or any.
        execution_device: where they are inside; by default where the forward runs, or where they are.
    """
    hook = _offloading_hook(module)
    if hook is None:
        held = [slot for slot in tensor_slots(module, recurse=False) if not slot.is_buffer]
        outside = [slot.tensor for slot in held]
        shared = SharedTensors()
        try:
            if execution_device is not None:
                for slot in held:
                    slot.tensor = shared.move(slot.tensor, find_place(execution_device))
            yield
        finally:
            for slot, tensor in zip(held, outside, strict=True):
                if slot.tensor.device != tensor.device:
                    with torch.no_grad():
                        tensor.copy_(slot.tensor)  # what was written into it inside
                    slot.tensor = tensor
        return
    usual = hook.execution_device
    try:
        hook.execution_device = usual if execution_device is None else execution_device
        hook.pre_forward(module)
        yield
    finally:
        hook.execution_device = usual
        hook.interrupted(module)


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a dispatched model, with its values on the CPU; what is on disk stays there, memory-mapped.

    Raises:
        ValueError: some tensors have no values.
    """
    return {name: tensor.to("cpu") for name, tensor in stored_values(model, model.state_dict().items())}


def stored_values(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Tensors with their values, each read when it is its turn.

    Args:
        model: any; of a dispatched one, what is off its device is taken from where it is.
        tensors: the model's, with their names.

    Raises:
        ValueError: one has no values.
    """
    hooks = {prefix: _offloading_hook(module) for prefix, module in model.named_modules(remove_duplicate=False)}
    stored = {
        f"{prefix}.{name}".lstrip("."): (hook.weights_map, name)
        for prefix, hook in hooks.items()
        if hook is not None and hook.weights_map is not None
        for name in hook.original_devices
    }
    for name, tensor in tensors:
        if not tensor.is_meta:
            yield name, tensor
        elif name in stored:
            weights, key = stored[name]
            yield name, weights[key].to(tensor.dtype)
        else:
            raise ValueError(f"{name} is on the meta device and has no values")


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: dict[str, Tensor | str],
    device_to_put_offload: int | str | torch.device | None = "cpu",
) -> dict[str, Tensor | str]:
    """Fill in the values of a module's weights.

    Args:
        module: one of a dispatched model.
        module_name: the name, in the whole model, of one of its weights.
        state_dict: of the whole model; entries of this module are replaced.
        device_to_put_offload: where offloaded values come to.

    Returns:
        The same `state_dict`.
    """
    prefix = module_name.rpartition(".")[0]
    with align_module_device(module, device_to_put_offload if has_offloaded_params(module) else None):
        for key, tensor in module.state_dict().items():
            if f"{prefix}.{key}" in state_dict:
                state_dict[f"{prefix}.{key}"] = tensor
    return state_dict


def _offloading_hook(module: nn.Module) -> AlignDevicesHook | None:
    hook = getattr(module, "_hf_hook", None)
    hooks = hook.hooks if isinstance(hook, SequentialHook) else (hook,)
    return next((hook for hook in hooks if isinstance(hook, AlignDevicesHook) and hook.offload), None)


class Stop(NamedTuple):
    """A module that gets a hook, and the tensors which that brings in: of all modules inside if it `is_whole`."""

    name: str
    module: nn.Module
    is_whole: bool
    slots: list[Slot]


def find_stops(
    module: nn.Module,
    is_whole: Callable[[str, nn.Module], bool],
    name: str = "",
    seen: set[nn.Module] | None = None,
) -> Iterator[Stop]:
    """The module and all inside, each once; of one that `is_whole`, by name and module, nothing inside.

    Args:
        module: where to begin.
        is_whole: whether one hook brings in all tensors inside.
        name: the module's.
        seen: modules that have had their turn.
    """
    seen = set() if seen is None else seen
    if module in seen:
        return
    seen.add(module)
    whole = is_whole(name, module)
    yield Stop(name, module, whole, list(tensor_slots(module, recurse=whole)))
    for child_name, child in () if whole else module.named_children():
        yield from find_stops(child, is_whole, join_names(name, child_name), seen)


def reads_inside(module: nn.Module, preloaded: Collection[str]) -> bool:
    """Whether a module's forward reads weights of modules inside without calling these, as far as is known.

    Args:
        module: any.
        preloaded: names of classes that the user gives.
    """
    return isinstance(module, _READS_INSIDE) or type(module).__name__ in preloaded


class Layout:
    """Where tensors are between forwards, and where modules run.

    Args:
        places: device or `disk` by name, without those that are not named.
        main: where runs what is on the CPU or disk.
        offload_buffers: buffers are where the map says, not where their module runs.
    """

    def __init__(self, places: Mapping[str, torch.device | str], main: torch.device, offload_buffers: bool) -> None:
        self._places = places
        self._main = main
        self._offload_buffers = offload_buffers

    def home(self, name: str) -> torch.device | str:
        """Of a tensor."""
        place: torch.device | str | None = lookup(self._places, name)
        return self._main if place is None else place

    def runs_on(self, name: str, slots: list[Slot]) -> torch.device | None:
        """Of a module; None if the map names only what is inside, and it holds no tensor itself."""
        place = lookup(self._places, name)
        if place is not None:
            return self._running(place)
        if slots:
            return self._running(self.home(join_names(name, slots[0].name)))
        return None if name else self._main

    def leaves(self, name: str, slot: Slot, device: torch.device) -> bool:
        """Whether a tensor is elsewhere between forwards."""
        stays = slot.is_buffer and not (self._offload_buffers and slot.is_persistent)
        return not stays and self.home(name) != device

    def _running(self, place: torch.device | str) -> torch.device:
        return self._main if isinstance(place, str) or place.type == "cpu" else place


def plan_stops(model: nn.Module, layout: Layout, preload: Collection[str]) -> Iterator[tuple[Stop, torch.device]]:
    """The modules that get a hook, with where they run: all that hold tensors, and the model itself."""

    def is_whole(name: str, module: nn.Module) -> bool:
        device = layout.runs_on(name, [])
        if device is None or not reads_inside(module, preload):
            return False
        return any(
            layout.leaves(join_names(name, slot.name), slot, device) for slot in tensor_slots(module, recurse=True)
        )

    for stop in find_stops(model, is_whole):
        device = layout.runs_on(stop.name, stop.slots)
        holds = stop.slots or next(tensor_slots(stop.module, recurse=True), None) is not None
        if device is not None and (holds or not stop.name):
            yield stop, device


def under(weights: Mapping[str, Tensor], name: str) -> Mapping[str, Tensor]:
    """Of weights by name, those in a module, by their names there."""
    return PrefixedDataset(weights, f"{name}.") if name else weights


def join_names(*names: str) -> str:
    """Dotted; empty ones are left out."""
    return ".".join(filter(None, names))
