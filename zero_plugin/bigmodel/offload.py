"""Keep all of a model's weights in host memory, or on disk, and bring in each module's for its forward."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero_plugin.bigmodel.align import AlignDevicesHook
from zero_plugin.bigmodel.hooks import add_hook_to_module
from zero_plugin.bigmodel.layout import find_stops, join_names, reads_inside, under
from zero_plugin.bigmodel.stored import OffloadedWeightsLoader, offload_weight, save_offload_index
from zero_plugin.bigmodel.tensors import SharedTensors

__all__ = ["attach_align_device_hook", "cpu_offload", "disk_offload"]


def cpu_offload(
    model: nn.Module,
    execution_device: int | str | torch.device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, Tensor] | None = None,
    preload_module_classes: Collection[str] | None = None,
) -> nn.Module:
    """Keep all weights in host memory; each module's come to the execution device for its forward.

    Args:
        model: changed in place.
        execution_device: by default where the first parameter is.
        offload_buffers: the state dict's buffers too.
        state_dict: the weights, on the CPU; by default the model's.
        preload_module_classes: as for `dispatch_model`.

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
    """Keep all weights on disk; each module's come to the execution device for its forward.

    Args:
        model: changed in place.
        offload_dir: weights are written there, unless they are on the meta device and there already.
        execution_device: by default where the first parameter is.
        offload_buffers: the state dict's buffers too.
        preload_module_classes: as for `dispatch_model`.

    Returns:
        The model.
    """
    index: dict[str, Any] = {}
    for name, tensor in model.state_dict().items():
        if not tensor.is_meta:
            offload_weight(tensor, name, offload_dir, index)
    save_offload_index(index, offload_dir)
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
    """Put an `AlignDevicesHook` on every module inside that holds tensors itself.

    Args:
        module: changed in place.
        execution_device: as for the hook; so are `offload`, `offload_buffers`, `skip_keys` and `tied_params_map`.
        offload: weights leave after each module's forward.
        weights_map: values of offloaded tensors by name in the whole model; by default the modules' own, on the CPU.
        offload_buffers: buffers leave too.
        module_name: the module's name in the whole model.
        skip_keys: keyword arguments that stay where they are.
        preload_module_classes: as for `dispatch_model`.
        tied_params_map: what hooks of the same model share.
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
