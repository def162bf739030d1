"""Spreads a model over devices, CPU memory and disk. Its forward then runs like on one device.

Alternatively, keeps all weights in CPU memory or on disk, and loads each module's weights for its forward. Or moves a
complete model to the GPU when it runs, and back to CPU memory when the next model runs.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zero_plugin.big_models.module_hooks import AlignDevicesHook, ModelHook, add_hook_to_module, remove_hook_from_module
from zero_plugin.big_models.placement import check_device_map, check_places, find_place, lookup
from zero_plugin.big_models.stored import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    offload_state_dict,
    offload_weight,
    read_offload_index,
    save_offload_index,
)
from zero_plugin.machine.hardware import clear_device_cache
from zero_plugin.tensors.modules import SharedTensors, Slot, find_tied_parameters, tensor_slots
from zero_plugin.tensors.nested import send_to_device

_logger = logging.getLogger(__name__)


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, int | str | torch.device],
    main_device: int | str | torch.device | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    offload_dir: str | Path | None = None,
    offload_index: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Place each part of a model by a map, and bring weights and inputs to the same device in each forward.

    Parts on `cpu` or `disk` run on `main_device`: their weights are loaded for the forward of their module, without
    gradients, and removed after it. If the map has only the CPU and the disk, everything runs on the CPU, and weights
    on disk are used from the mapped files.

    Args:
        model: the model, changed in place; parts on disk may be on the meta device.
        device_map: name of a module or tensor → GPU index, `cpu`, `disk` or a device. The most specific name counts.
        main_device: by default the map's first device other than `cpu` and `disk`, or the CPU if there is none.
        state_dict: values for tensors with the place `cpu` that are on the meta device.
        offload_dir: the folder that has the tensors on disk, or that they are written to.
        offload_index: the index of these tensors, see `OffloadedWeightsLoader`; by default the folder's.
        offload_buffers: offload buffers to the CPU or disk too. Otherwise they stay on the device of their module.
        skip_keys: keyword arguments, and keys of outputs, that are not moved.
        preload_module_classes: names of classes that read weights of their submodules without calling these. torch's
            own attention and encoder layers need not be named.
        force_hooks: use hooks even if the complete model is on one device.

    Returns:
        The model, with the map as `hf_device_map`.

    Raises:
        ValueError: a tensor has no place or no values, this machine lacks a device, or a folder to write to is missing.
    """
    check_device_map(model, device_map)
    check_places(device_map)
    held: Any = model
    places = {name: place if place == "disk" else find_place(place) for name, place in device_map.items()}
    where = set(places.values())
    cpu = torch.device("cpu")
    running = (place for place in places.values() if isinstance(place, torch.device) and place != cpu)
    main = next(running, cpu) if main_device is None else find_place(main_device)
    if where != {main} or force_hooks:
        layout = Layout(places, main, offload_buffers)
        plan = list(plan_stops(model, layout, preload_module_classes or ()))
        weights = _collect(model, plan, layout, state_dict or {}, offload_dir, offload_index)
        shared = SharedTensors()
        for stop, device in plan:
            leaves = any(name in weights for name in stop.slots)
            hook = AlignDevicesHook(
                device,
                offload=leaves,
                io_same_device=not stop.name,
                weights_map=under(weights, stop.name) if leaves else None,
                offload_buffers=offload_buffers,
                place_submodules=stop.is_whole,
                skip_keys=skip_keys,
                tied_params_map=shared,
            )
            add_hook_to_module(stop.module, hook, append=True)
        if weights:
            _logger.info(f"{len(weights)} tensors of {type(model).__name__} are off their device between forwards.")
        held.to = functools.partial(_move, model, "to")
        held.cuda = functools.partial(_move, model, "cuda")
    else:
        _refuse_empty(model)
        model.to(main)
    held.hf_device_map = dict(device_map)
    return model


def _collect(
    model: nn.Module,
    plan: list[tuple[Stop, torch.device]],
    layout: Layout,
    state_dict: Mapping[str, Tensor],
    offload_dir: str | Path | None,
    offload_index: Mapping[str, Any] | None,
) -> OffloadedWeightsLoader:
    """Collect the offloaded tensors by name. Write those with the place `disk`, unless they are stored already."""
    tied = {name: group for group in find_tied_parameters(model) for name in group}
    known = (
        read_offload_index(offload_dir) if offload_index is None and offload_dir is not None else offload_index or {}
    )
    in_memory: dict[str, Tensor] = {}
    on_disk: dict[str, Any] = {}
    written: dict[str, Any] = {}
    copies: dict[int, tuple[Tensor, Tensor]] = {}  # by id; keeps the tensor too, so no other one can get its id
    leaving = (
        (name, slot.tensor)
        for stop, device in plan
        for name, slot in stop.slots.items()
        if layout.leaves(name, slot, device)
    )
    for name, tensor in leaving:
        names = [name, *tied.get(name, ())]
        home = layout.home(name)
        if isinstance(home, torch.device):
            value = next((state_dict[each] for each in names if each in state_dict), tensor)
            if value.is_meta:
                raise ValueError(
                    f"{name} is on the meta device and has no values; load its weights, or pass state_dict."
                )
            if id(value) not in copies:
                copies[id(value)] = value, value.to(home)
            in_memory[name] = copies[id(value)][1]
            continue
        stored = next((each for each in names if each in known), None)
        if not tensor.is_meta and (stored is None or offload_index is None):
            if offload_dir is None:
                raise ValueError(f"device_map has {name} on disk; pass an offload_dir to write it to.")
            stored = next((each for each in names if each in written), name)
            if stored not in written:
                offload_weight(tensor, stored, offload_dir, written)
        if stored is None:
            raise ValueError(f"{name} is on the meta device, and neither offload_dir nor offload_index has its values.")
        on_disk[name] = {"weight_name": stored, **(written.get(stored) or known[stored])}
    if offload_dir is not None:
        save_offload_index(written, offload_dir)
    return OffloadedWeightsLoader(in_memory, offload_dir, on_disk)


def _refuse_empty(model: nn.Module) -> None:
    if empty := [slot.name for slot in tensor_slots(model, recurse=True) if slot.tensor.is_meta]:
        raise ValueError(
            f"{', '.join(empty)} are on the meta device and have no values; load the model's weights first. Buffers "
            "that are in no checkpoint have values if the model is built with include_buffers=False."
        )


def _move(model: nn.Module, method: str, *args: Any, **kwargs: Any) -> Any:
    if any(parameter.is_meta for parameter in model.parameters()):
        raise RuntimeError("You can't move a model that has some modules offloaded to cpu or disk.")
    _logger.warning("You shouldn't move a model that is dispatched: its inputs go to its previous device.")
    return getattr(type(model), method)(model, *args, **kwargs)


def cpu_offload(
    model: nn.Module,
    execution_device: int | str | torch.device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, Tensor] | None = None,
    preload_module_classes: Collection[str] | None = None,
) -> nn.Module:
    """Keep all weights in CPU memory. Load each module's weights to the execution device for its forward.

    Args:
        model: the model, changed in place.
        execution_device: by default the first parameter's device.
        offload_buffers: offload the state dict's buffers too.
        state_dict: the weights, on the CPU; by default the model's.
        preload_module_classes: see `dispatch_model`.

    Returns:
        The model.
    """
    if state_dict is None:
        state_dict = {name: tensor.to("cpu") for name, tensor in model.state_dict().items()}
    return _offload(model, execution_device, offload_buffers, state_dict, preload_module_classes)


def disk_offload(
    model: nn.Module,
    offload_dir: str | Path,
    execution_device: int | str | torch.device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Collection[str] | None = None,
) -> nn.Module:
    """Keep all weights on disk. Load each module's weights to the execution device for its forward.

    Args:
        model: the model, changed in place.
        offload_dir: the folder to write weights to. It must have the weights that are on the meta device already.
        execution_device: by default the first parameter's device.
        offload_buffers: offload the state dict's buffers too.
        preload_module_classes: see `dispatch_model`.

    Returns:
        The model.
    """
    offload_state_dict(offload_dir, {name: value for name, value in model.state_dict().items() if not value.is_meta})
    weights = OffloadedWeightsLoader(save_folder=offload_dir)
    return _offload(model, execution_device, offload_buffers, weights, preload_module_classes)


def attach_align_device_hook(
    module: nn.Module,
    execution_device: int | str | torch.device | None = None,
    offload: bool = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    tied_params_map: SharedTensors | None = None,
) -> None:
    """Put an `AlignDevicesHook` on the module and every submodule that holds tensors itself.

    Args:
        module: the module, changed in place.
        execution_device: see `AlignDevicesHook`; also for `offload`, `offload_buffers`, `skip_keys` and
            `tied_params_map`.
        offload: remove weights after each module's forward.
        weights_map: name in the complete model → value of an offloaded tensor; by default the modules' own, on the CPU.
        offload_buffers: remove buffers too.
        module_name: the module's name in the complete model.
        skip_keys: keyword arguments that are not moved.
        preload_module_classes: see `dispatch_model`.
        tied_params_map: the tied weights, shared by all hooks of one model.
    """
    preloaded = frozenset(preload_module_classes or ())
    shared = SharedTensors() if tied_params_map is None else tied_params_map
    for stop in list(find_stops(module, lambda _, part: offload and reads_inside(part, preloaded))):
        if stop.slots:
            hook = AlignDevicesHook(
                execution_device,
                offload,
                weights_map=None if weights_map is None else under(weights_map, join_names(module_name, stop.name)),
                offload_buffers=offload_buffers,
                place_submodules=stop.is_whole,
                skip_keys=skip_keys,
                tied_params_map=shared,
            )
            add_hook_to_module(stop.module, hook, append=True)


def _offload(
    model: nn.Module,
    execution_device: int | str | torch.device | None,
    offload_buffers: bool,
    weights: Mapping[str, Tensor],
    preload_module_classes: Collection[str] | None,
) -> nn.Module:
    device = next(model.parameters()).device if execution_device is None else execution_device
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True), append=True)
    attach_align_device_hook(
        model,
        device,
        offload=True,
        weights_map=weights,
        offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes,
    )
    return model


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: int | str | torch.device | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep a model in CPU memory until it runs. It then stays on its device until the hook's `offload` is called.

    For a pipeline of models that each run in a loop, and that do not fit on the device together.

    Args:
        model: the model, changed in place.
        execution_device: by default the GPU, or the CPU without a GPU.
        prev_module_hook: hook of the previous model in the pipeline. That model is offloaded when this one runs.

    Returns:
        The model, and its hook.
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


class CpuOffload(ModelHook):
    """A hook that moves the module to a device for its forward, and leaves it there.

    Args:
        execution_device: by default the GPU, or the CPU without a GPU.
        prev_module_hook: hook of the model to offload before.
    """

    def __init__(
        self,
        execution_device: int | str | torch.device | None = None,
        prev_module_hook: UserCpuOffloadHook | None = None,
    ) -> None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self.execution_device = find_place(execution_device if execution_device is not None else accelerator or "cpu")
        self.prev_module_hook = prev_module_hook

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the module to CPU memory."""
        return module.to("cpu")

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Offload the previous model, then move this one and its arguments to the device."""
        if self.prev_module_hook is not None and _device(self.prev_module_hook.model).type != "cpu":
            self.prev_module_hook.offload()
            clear_device_cache()
        if _device(module) != self.execution_device:
            module.to(self.execution_device)
        return send_to_device(args, self.execution_device), send_to_device(kwargs, self.execution_device)


class UserCpuOffloadHook:
    """The handle of `cpu_offload_with_hook` for offloading a model.

    Args:
        model: the model.
        hook: the model's hook.
    """

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Move the model back to CPU memory."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hook."""
        remove_hook_from_module(self.model)


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


# The forward of these classes reads weights of submodules without calling them.
_READS_INSIDE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


class Stop(NamedTuple):
    """A module that gets a hook, and the hook's tensors by full name. If `is_whole`, these are all tensors inside."""

    name: str
    module: nn.Module
    is_whole: bool
    slots: dict[str, Slot]


def find_stops(
    module: nn.Module,
    is_whole: Callable[[str, nn.Module], bool],
    name: str = "",
    seen: set[nn.Module] | None = None,
) -> Iterator[Stop]:
    """Yield the module and all its submodules, each once. Do not descend into modules for which `is_whole` is true.

    Args:
        module: the module to begin with.
        is_whole: returns, for a name and module, whether one hook loads all tensors inside.
        name: the module's name.
        seen: modules that were yielded before.
    """
    seen = set() if seen is None else seen
    if module in seen:
        return
    seen.add(module)
    whole = is_whole(name, module)
    yield Stop(name, module, whole, named_slots(name, module, recurse=whole))
    for child_name, child in () if whole else module.named_children():
        yield from find_stops(child, is_whole, join_names(name, child_name), seen)


def named_slots(name: str, module: nn.Module, *, recurse: bool) -> dict[str, Slot]:
    """Return the `tensor_slots` of the module `name`, by full name."""
    return {join_names(name, slot.name): slot for slot in tensor_slots(module, recurse=recurse)}


def reads_inside(module: nn.Module, preloaded: Collection[str]) -> bool:
    """Return whether a module's forward is known to read weights of submodules without calling them.

    Args:
        module: any module.
        preloaded: names of classes from the user.
    """
    return isinstance(module, _READS_INSIDE) or type(module).__name__ in preloaded


class Layout:
    """The places of tensors between forwards, and the devices on which modules run.

    Args:
        places: name of a module or tensor → device or `disk`.
        main: the device for modules on the CPU or disk.
        offload_buffers: place buffers by the map, not on the device of their module.
    """

    def __init__(self, places: Mapping[str, torch.device | str], main: torch.device, offload_buffers: bool) -> None:
        self._places = places
        self._main = main
        self._offload_buffers = offload_buffers

    def home(self, name: str) -> torch.device | str:
        """Return the place of a tensor between forwards."""
        place: torch.device | str | None = lookup(self._places, name)
        return self._main if place is None else place

    def runs_on(self, name: str, slots: Collection[str]) -> torch.device | None:
        """Return the device that a module runs on; None if only its submodules have places and it holds no tensor."""
        place = lookup(self._places, name)
        if place is not None:
            return self._running(place)
        if slots:
            return self._running(self.home(next(iter(slots))))
        return None if name else self._main

    def leaves(self, name: str, slot: Slot, device: torch.device) -> bool:
        """Return whether a tensor is offloaded from its device between forwards."""
        stays = slot.is_buffer and not (self._offload_buffers and slot.is_persistent)
        return not stays and self.home(name) != device

    def _running(self, place: torch.device | str) -> torch.device:
        return self._main if isinstance(place, str) or place.type == "cpu" else place


def plan_stops(model: nn.Module, layout: Layout, preload: Collection[str]) -> Iterator[tuple[Stop, torch.device]]:
    """Yield the modules that get a hook, with their devices: all that hold tensors, and the model itself."""

    def is_whole(name: str, module: nn.Module) -> bool:
        device = layout.runs_on(name, ())
        if device is None or not reads_inside(module, preload):
            return False
        slots = named_slots(name, module, recurse=True)
        return any(layout.leaves(full_name, slot, device) for full_name, slot in slots.items())

    for stop in find_stops(model, is_whole):
        device = layout.runs_on(stop.name, stop.slots)
        holds = stop.slots or next(tensor_slots(stop.module, recurse=True), None) is not None
        if device is not None and (holds or not stop.name):
            yield stop, device


def under(weights: Mapping[str, Tensor], name: str) -> Mapping[str, Tensor]:
    """Return the weights in the module `name`, by their names in that module."""
    return PrefixedDataset(weights, f"{name}.") if name else weights


def join_names(*names: str) -> str:
    """Join names with dots; empty names are left out."""
    return ".".join(filter(None, names))
