"""Spread a model over devices, host memory and disk, such that its forward runs as if it were on one."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero_plugin.bigmodel.align import AlignDevicesHook
from zero_plugin.bigmodel.devices import check_places, find_place
from zero_plugin.bigmodel.hooks import add_hook_to_module
from zero_plugin.bigmodel.layout import Layout, Stop, join_names, plan_stops, under
from zero_plugin.bigmodel.placement import check_device_map
from zero_plugin.bigmodel.stored import (
    OffloadedWeightsLoader,
    offload_weight,
    read_offload_index,
    save_offload_index,
)
from zero_plugin.bigmodel.tensors import SharedTensors, find_tied_parameters, tensor_slots

__all__ = ["dispatch_model"]

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
    """Put each part of a model where a map says, and let weights and inputs come together in its forward.

    What is on `cpu` or `disk` runs on `main_device`: its weights come in for the forward of the module that holds them,
    without gradients, and leave after it. With a map to the CPU and the disk alone, everything runs on the CPU, and the
    disk's weights are used where the file is mapped.

    Args:
        model: changed in place; parts on disk may be on the meta device.
        device_map: GPU index, `cpu`, `disk` or a device, by name of module or tensor; the most exact name counts.
        main_device: by default the map's first that is neither `cpu` nor `disk`, else the CPU.
        state_dict: values of tensors on the CPU that are on the meta device.
        offload_dir: where tensors on disk are, or are written to.
        offload_index: where they are, see `OffloadedWeightsLoader`; by default the folder's.
        offload_buffers: buffers are on the CPU or disk with their module too; otherwise they stay where it runs.
        skip_keys: keyword arguments, and keys of outputs, that stay where they are.
        preload_module_classes: names of classes that read weights of modules inside without calling these; torch's own
            attention and encoder layers need not be named.
        force_hooks: also where the whole model is on one device.

    Returns:
        The model, with the map as `hf_device_map`.

    Raises:
        ValueError: a tensor has no place or no values, a device is not here, or there is no folder to write to.
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
        _attach(plan, weights, offload_buffers, skip_keys)
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
    """The tensors that leave, by name; those on disk are written unless they are there."""
    tied = {name: group for group in find_tied_parameters(model) for name in group}
    known = (
        read_offload_index(offload_dir) if offload_index is None and offload_dir is not None else offload_index or {}
    )
    in_memory: dict[str, Tensor] = {}
    on_disk: dict[str, Any] = {}
    written: dict[str, Any] = {}
    copies: dict[int, Tensor] = {}
    leaving = (
        (join_names(stop.name, slot.name), slot.tensor)
        for stop, device in plan
        for slot in stop.slots
        if layout.leaves(join_names(stop.name, slot.name), slot, device)
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
            in_memory[name] = copies.setdefault(id(value), value.to(home))
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


def _attach(
    plan: list[tuple[Stop, torch.device]],
    weights: OffloadedWeightsLoader,
    offload_buffers: bool,
    skip_keys: str | list[str] | None,
) -> None:
    shared = SharedTensors()
    for stop, device in plan:
        leaves = any(join_names(stop.name, slot.name) in weights for slot in stop.slots)
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


def _refuse_empty(model: nn.Module) -> None:
    if empty := [slot.name for slot in tensor_slots(model, recurse=True) if slot.tensor.is_meta]:
        raise ValueError(
            f"{', '.join(empty)} are on the meta device and have no values; load the model's weights first. Buffers "
            "that are in no checkpoint have values if the model is built with include_buffers=False."
        )


def _move(model: nn.Module, method: str, *args: Any, **kwargs: Any) -> Any:
    if any(parameter.is_meta for parameter in model.parameters()):
        raise RuntimeError("You can't move a model that has some modules offloaded to cpu or disk.")
    _logger.warning("You shouldn't move a model that is dispatched: its inputs go to where it was.")
    return getattr(type(model), method)(model, *args, **kwargs)
