"""Opens whatever a folder holds for a conversion: checkpoints of this package, of DeepSpeed, and model folders.

Of DeepSpeed's own checkpoints stages 0 to 3 are read: weights, fp32 master weights and optimizer states. At stage 0,
without ZeRO, the file of the optimizer does not name the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from zero_plugin.checkpoint.convert.deepspeed_files import (
    DeepSpeedFiles,
    Piece,
    TrainedGroup,
    equal_pieces,
    join_pieces,
    list_deepspeed_files,
    trained_groups,
)
from zero_plugin.checkpoint.convert.source import Source, Stored, map_tensor
from zero_plugin.checkpoint.folders import choose_checkpoint, read_manifest
from zero_plugin.checkpoint.objects import read_nested, tensor_storage
from zero_plugin.checkpoint.summary import KINDS, find_deepspeed, recognise
from zero_plugin.errors import CheckpointError
from zero_plugin.strategies.optimizer_states import is_setting
from zero_plugin.tensors.modules import MASTER_WEIGHT, WEIGHT
from zero_plugin.tensors.safetensors_files import read_model_folder

_EXTRA_STATE: Final = "_extra_state"


def open_source(folder: Path, *, model: int | None = None, trust_pickle: bool = False) -> Source:
    """A checkpoint of this package or of DeepSpeed, or a model folder.

    Args:
        folder: where it is.
        model: which one of a checkpoint's, see `open_checkpoint`.
        trust_pickle: see `open_deepspeed`.

    Raises:
        CheckpointError: it is none of these, or is damaged.
    """
    kind = recognise(folder)
    if kind in ("checkpoint", "several"):
        return open_checkpoint(folder, model)
    if kind == "deepspeed":
        return open_deepspeed(folder, trust_pickle=trust_pickle)
    if kind == "model":
        return open_model(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder.")
    what = "holds nothing that can be converted" if kind is None else f"is {KINDS[kind]}, which is not converted"
    raise CheckpointError(
        f"{folder} {what}.\nName a checkpoint of save_state or of DeepSpeed, or a folder of safetensors."
    )


def open_checkpoint(folder: Path, model: int | None = None) -> Source:
    """One model of a checkpoint; of a folder of several checkpoints, of the newest complete one.

    Args:
        folder: of the checkpoint, or of several.
        model: which one, from 0 in the order of `prepare`; None where there is one alone.

    Raises:
        CheckpointError: nothing complete is there, or the checkpoint has several models and none was named.
    """
    folder, damages = choose_checkpoint(folder)
    manifest = read_manifest(folder)
    count = len(manifest.models)
    if (model is None and count != 1) or (model is not None and not 0 <= model < count):
        kinds = ", ".join(f"{index}: {stored.kind}" for index, stored in enumerate(manifest.models)) or "none"
        raise CheckpointError(f"{folder} has {count} models ({kinds}).\nName one with --model.")
    index = model or 0
    stored = manifest.models[index]
    training = read_nested(folder / "training")
    record = training["models"][index]
    files: dict[str, Any] = {}
    return Source(
        folder=folder / stored.folder,
        model_class=stored.kind,
        tensors={key: map_tensor(folder, place, files) for key, place in stored.places.items()},
        tied=stored.tied,
        origin={"format": "zero_plugin", "created": manifest.about.get("created")},
        optimizer=record["optimizer"],
        extra_states=record["extra_states"],
        schedules=training["schedules"],
        notes=[f"a newer checkpoint was passed over: {damage}" for damage in damages],
    )


def open_model(folder: Path) -> Source:
    """The weights of a model folder.

    Raises:
        CheckpointError: it has none, or a file is missing or damaged.
    """
    model = read_model_folder(folder)
    files: dict[str, Any] = {}
    return Source(
        folder=folder,
        model_class=model.model_class,
        tensors={(WEIGHT, name): map_tensor(folder, place, files) for name, place in model.places.items()},
        tied=model.tied,
        origin={"format": "Hugging Face"},
    )


def open_deepspeed(folder: Path, *, trust_pickle: bool = False) -> Source:
    """A checkpoint of `save_checkpoint`: the folder, or the one that its `latest` tag names.

    Args:
        folder: of the checkpoint.
        trust_pickle: read classes that are not known to be harmless, which may run code.

    Raises:
        CheckpointError: it is none, is damaged, holds other classes, or was split otherwise than by ZeRO.
    """
    found = find_deepspeed(folder)
    if found is None:
        raise CheckpointError(f"{folder} has no *_model_states.pt, so it is no checkpoint of DeepSpeed.")
    files = list_deepspeed_files(found, trust_pickle=trust_pickle)
    model = files.models[0]
    if not isinstance(model.get("module"), Mapping):
        raise CheckpointError(f"{found} has no module in its model file: it is not of DeepSpeed's save_checkpoint.")
    notes: list[str] = []
    groups = trained_groups(files) if files.optimizers else plain_groups(model, notes)
    tied = _tied_names(model)
    return Source(
        folder=found,
        model_class="model",  # DeepSpeed keeps no name of it
        tensors=_tensors(files, groups, tied),
        tied=tied,
        origin={
            "format": "DeepSpeed",
            "zero_stage": _zero_stage(files),
            "processes": model.get("dp_world_size", 1),
            "versions": {"deepspeed": model.get("ds_version")},
        },
        optimizer=_optimizer_record(files, groups) if groups else None,
        extra_states={
            name.removesuffix(_EXTRA_STATE).rstrip("."): state
            for name, state in model["module"].items()
            if name.split(".")[-1] == _EXTRA_STATE and not isinstance(state, Tensor)
        },
        schedules=[_schedule(model["lr_scheduler"])] if model.get("lr_scheduler") else [],
        notes=notes,
    )


def _tensors(
    files: DeepSpeedFiles, groups: Iterable[TrainedGroup], tied: Mapping[str, str]
) -> dict[tuple[str, str], Stored]:
    module = files.models[0]["module"]
    tensors: dict[tuple[str, str], Stored] = {}
    for group in groups:
        for name, master_weight in group.master_weights.items():
            weight: Tensor = module[name]
            is_whole = weight.numel() == math.prod(master_weight.shape)  # else partitioned, and nothing of it is here
            if weight.dtype == master_weight.dtype:
                tensors[WEIGHT, name] = master_weight
            else:
                tensors[WEIGHT, name] = Stored.of(weight) if is_whole else master_weight.cast(weight.dtype)
                tensors[MASTER_WEIGHT, name] = master_weight
        for name, states in group.states.items():
            tensors |= {(key, name): state for key, state in states.items()}
    frozen = files.models[0].get("frozen_param_shapes") or {}
    for name, tensor in module.items():
        if (WEIGHT, name) in tensors or name in tied or not isinstance(tensor, Tensor):
            continue
        shape = tuple(frozen.get(name, tensor.shape))
        is_whole = tensor.numel() == math.prod(shape)
        tensors[WEIGHT, name] = Stored.of(tensor) if is_whole else _frozen(files, name, shape)
    return tensors


def _frozen(files: DeepSpeedFiles, name: str, shape: tuple[int, ...]) -> Stored:
    """A frozen parameter of stage 3."""
    [(_, _, pieces)] = equal_pieces({name: shape}, len(files.models))
    return join_pieces(name, shape, [model["frozen_param_fragments"][name] for model in files.models], pieces)


def _tied_names(model: Mapping[str, Any]) -> dict[str, str]:
    """As DeepSpeed has noted them; without ZeRO, by the memory that they share in the file."""
    return {**_names_of_same_memory(model["module"]), **(model.get("shared_params") or {})}


def _names_of_same_memory(module: Mapping[str, Any]) -> dict[str, str]:
    """Each further name of a tensor → its first name."""
    tied: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, tensor in module.items():
        if isinstance(tensor, Tensor) and tensor.numel():
            place = (tensor_storage(tensor), tensor.storage_offset(), tensor.shape)
            if (kept := first.setdefault(place, name)) != name:
                tied[name] = kept
    return tied


def _optimizer_record(files: DeepSpeedFiles, groups: list[TrainedGroup]) -> dict[str, Any]:
    model = files.models[0]
    saved = files.optimizers[0]["optimizer_state_dict"] if files.optimizers else model["optimizer"]
    return {
        "algorithm": _algorithm(groups[0].settings, model.get("ds_config") or {}),
        "groups": [
            {
                "params": list(group.master_weights),
                "settings": {key: value for key, value in group.settings.items() if is_setting(key, value)},
            }
            for group in groups
        ],
        "scalars": {name: numbers for group in groups for name, numbers in group.scalars.items()},
        "loss_scale": _loss_scale(vars(saved["loss_scaler"]) if saved.get("loss_scaler") else saved),
        "applied_steps": model["global_steps"] - model["skipped_steps"],
        "skipped_in_a_row": 0,
    }


def _algorithm(settings: Mapping[str, Any], config: Any) -> str | None:
    """As `algorithm_of` names it; None where the files do not tell, as with a CPU kernel that the script built."""
    section = config.get("optimizer") if isinstance(config, Mapping) else None
    if section:
        name = str(section["type"]).lower()
        decoupled = section.get("params", {}).get("adam_w_mode", True)  # DeepSpeed's Adam is AdamW but for this
        return "adamw" if name == "adam" and decoupled else name
    if "decoupled_weight_decay" in settings:
        return "adamw" if settings["decoupled_weight_decay"] else "adam"
    return "sgd" if "nesterov" in settings else None


def _loss_scale(scaler: Mapping[str, Any]) -> dict[str, float]:
    if "last_overflow_iter" not in scaler:
        return {}  # a fixed one, or none
    return {
        "value": float(scaler["cur_scale"]),
        "good_steps": scaler["cur_iter"] - scaler["last_overflow_iter"] - 1,
        "patience": scaler.get("cur_hysteresis", 1),
    }


def _schedule(state: Mapping[str, Any]) -> dict[str, Any]:
    """A learning-rate scheduler's state, for the torch one that replaces one of DeepSpeed's."""
    if "last_batch_iteration" in state and "last_epoch" not in state:
        return {"last_epoch": state["last_batch_iteration"] + 1}  # it counts from -1, torch from 0
    return dict(state)


def _zero_stage(files: DeepSpeedFiles) -> int:
    return int(files.optimizers[0]["optimizer_state_dict"].get("zero_stage", 0)) if files.optimizers else 0


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
    found = {
        name: tensor
        for name, tensor in model["module"].items()
        if name not in buffers and isinstance(tensor, Tensor) and tensor.is_floating_point()
    }
    shared = _names_of_same_memory(found)
    return {name: tensor for name, tensor in found.items() if name not in shared}


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
            group.master_weights[name] = Stored.of(tensor)
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
