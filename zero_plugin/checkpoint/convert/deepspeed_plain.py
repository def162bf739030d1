"""The optimizer of a DeepSpeed checkpoint without ZeRO (stage 0), whose file does not name the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_plugin.checkpoint.convert.deepspeed_states import Piece, TrainedGroup
from zero_plugin.checkpoint.convert.source import Stored
from zero_plugin.checkpoint.objects import tensor_storage

__all__ = ["plain_groups"]


def plain_groups(model: Mapping[str, Any], notes: list[str]) -> list[TrainedGroup]:
    """The parameter groups; none, and a note, where nobody can tell which states are whose.

    Args:
        model: the content of the model's file.
        notes: what could not be read is added.
    """
    saved = model.get("optimizer")
    if not saved:
        notes.append("there is no optimizer in it")
        return []
    parameters = _parameters(model)
    has_copies = "fp32_groups_flat" in saved or "fp32_groups" in saved
    groups = _copied_groups(saved, parameters) if has_copies else _torch_groups(saved, parameters)
    if groups is None:
        notes.append(
            "the optimizer's states: without ZeRO, DeepSpeed stores them without the parameters' names, and equal "
            "shapes in several groups, or beside frozen ones, leave open which are whose"
        )
    return groups or []


def _parameters(model: Mapping[str, Any]) -> dict[str, Tensor]:
    """What may be trained, in the model's order, each shared tensor once."""
    buffers = set(model.get("buffer_names") or ())
    seen: set[Any] = set()
    found: dict[str, Tensor] = {}
    for name, tensor in model["module"].items():
        if name in buffers or not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            continue
        place = (tensor_storage(tensor), tensor.storage_offset(), tensor.shape)
        if place not in seen:
            seen.add(place)
            found[name] = tensor
    return found


def _torch_groups(saved: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> list[TrainedGroup] | None:
    """A torch optimizer's own state: the weights that it steps are the module's."""
    indices = [index for settings in saved["param_groups"] for index in settings["params"]]
    shapes = {index: _shape_of(saved["state"].get(index, {})) for index in indices}
    names = _names_by_shape(saved["param_groups"], shapes, parameters)
    if names is None:
        return None
    groups = []
    for settings in saved["param_groups"]:
        group = TrainedGroup(settings)
        for index in settings["params"]:
            name, tensor = names[index], parameters[names[index]]
            group.masters[name] = Stored.of(tensor)
            for key, value in saved["state"].get(index, {}).items():
                if isinstance(value, Tensor) and value.ndim and key != "step":
                    group.states.setdefault(name, {})[key] = Stored.of(value)
                elif isinstance(value, Tensor | int | float):
                    group.scalars.setdefault(name, {})[key] = value.item() if isinstance(value, Tensor) else value
        groups.append(group)
    return groups


def _names_by_shape(
    groups: Sequence[Mapping[str, Any]], shapes: Mapping[int, torch.Size | None], parameters: Mapping[str, Tensor]
) -> dict[int, str] | None:
    """The parameter of each index: by name where torch was given names, else by place where that is certain.

    It is where there is one group of all parameters, or where a shape occurs in one group only, as often as in the
    model.
    """
    if all("param_names" in group for group in groups):
        return {
            index: name for group in groups for index, name in zip(group["params"], group["param_names"], strict=True)
        }
    if len(groups) == 1 and len(groups[0]["params"]) == len(parameters):
        return dict(zip(groups[0]["params"], parameters, strict=True))
    names: dict[int, str] = {}
    for shape in set(shapes.values()):
        owners = [group for group in groups if any(shapes[index] == shape for index in group["params"])]
        indices = [index for group in owners for index in group["params"] if shapes[index] == shape]
        alike = [name for name, tensor in parameters.items() if tensor.shape == shape]
        if shape is None or len(owners) > 1 or len(alike) != len(indices):
            return None
        names.update(zip(indices, alike, strict=True))
    return names


def _copied_groups(saved: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> list[TrainedGroup] | None:
    """32-bit copies: one flat buffer for each group, or one of each parameter. Rounded, they tell whose they are."""
    base = saved["optimizer_state_dict"]
    left = dict(parameters)
    groups = []
    for number, settings in enumerate(base["param_groups"]):
        group = TrainedGroup(settings)
        joined = saved["fp32_groups_flat"][number : number + 1] if "fp32_groups_flat" in saved else None
        for index, copy in zip(settings["params"], joined or saved["fp32_groups"][number], strict=True):
            flat = copy.detach().reshape(-1)
            states = [
                {
                    key: value.reshape(-1) if isinstance(value, Tensor) and value.ndim else value
                    for key, value in base["state"].get(index, {}).items()
                }
            ]
            offset = 0
            while offset < flat.numel():
                name = next((name for name, tensor in left.items() if _is_at(tensor, flat, offset)), None)
                if name is None:
                    return None
                tensor = left.pop(name)
                group.add(name, tuple(tensor.shape), [flat], states, [Piece(0, offset, tensor.numel())])
                offset += tensor.numel()
        groups.append(group)
    return groups


def _is_at(tensor: Tensor, flat: Tensor, offset: int) -> bool:
    piece = flat[offset : offset + tensor.numel()]
    return piece.numel() == tensor.numel() > 0 and torch.equal(piece.to(tensor.dtype), tensor.reshape(-1))


def _shape_of(state: Mapping[str, Any]) -> torch.Size | None:
    return next((value.shape for key, value in state.items() if isinstance(value, Tensor) and key != "step"), None)
