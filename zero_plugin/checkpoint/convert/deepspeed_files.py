"""Reads the checkpoints of DeepSpeed, stages 0 to 3: weights, fp32 master weights and optimizer states.

The files are pickles, which are mapped into memory; only harmless classes in them are built. At stage 0, without ZeRO,
the optimizer's state does not name the parameters.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from zero_plugin.checkpoint.convert.source import Source, Stored
from zero_plugin.checkpoint.objects import NUMPY_CLASSES, names_of_same_memory
from zero_plugin.checkpoint.summary import find_deepspeed
from zero_plugin.errors import CheckpointError
from zero_plugin.strategies.optimizer_states import is_setting
from zero_plugin.tensors.modules import MASTER_WEIGHT, WEIGHT

_OPTIMIZER_FILE: Final = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_TRUST: Final = "If you trust its author, give --trust_pickle."
_MODEL_FILE: Final = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_EXTRA_STATE: Final = "_extra_state"


class Record:
    """A stand-in for a plain object of DeepSpeed, with its attributes and without its code."""


# DeepSpeed's own classes in its checkpoints, each with the class that replaces it.
_STAND_INS: Final[list[Any]] = [
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    *(
        (Record, f"deepspeed.{name}")
        for name in (
            "utils.tensor_fragment.fragment_address",
            "runtime.fp16.loss_scaler.LossScaler",
            "runtime.fp16.loss_scaler.DynamicLossScaler",
        )
    ),
]


@dataclass(frozen=True, slots=True)
class _Files:
    """The opened files of one checkpoint.

    Attributes:
        folder: their folder.
        models: the model files of all ranks if the model is partitioned (stage 3), otherwise of rank 0 only.
        optimizers: the optimizer files of all ranks; empty without ZeRO.
    """

    folder: Path
    models: tuple[Mapping[str, Any], ...]
    optimizers: tuple[Mapping[str, Any], ...]


_Piece: TypeAlias = tuple[int, slice]  # a rank, and the slice of its flat buffer that holds a part of one parameter


@dataclass(slots=True)
class _TrainedGroup:
    """The contents of one parameter group.

    Attributes:
        settings: DeepSpeed's settings of the group: `lr`, `betas`, …
        tensors: (kind, parameter) → the master weight (which the optimizer steps), and each state that is a tensor.
        scalars: parameter → state that is a number → its value.
    """

    settings: Mapping[str, Any]
    tensors: dict[tuple[str, str], Stored] = field(default_factory=dict)
    scalars: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def parameters(self) -> list[str]:
        """Names of the group's parameters."""
        return [name for kind, name in self.tensors if kind == MASTER_WEIGHT]

    def add(
        self,
        name: str,
        shape: tuple[int, ...],
        flats: Sequence[Tensor],
        states: Sequence[Mapping[str, Any]],
        pieces: Sequence[_Piece],
    ) -> None:
        """Add a parameter from each rank's flat buffer and that buffer's states."""
        self.tensors[MASTER_WEIGHT, name] = _join_pieces(name, shape, flats, pieces)
        for key, first in states[0].items():
            if isinstance(first, Tensor) and first.ndim:
                self.tensors[key, name] = _join_pieces(name, shape, [state[key] for state in states], pieces)
            elif isinstance(first, Tensor | int | float):
                number = first.item() if isinstance(first, Tensor) else first
                self.scalars.setdefault(name, {})[key] = number


def open_deepspeed(folder: Path, *, trust_pickle: bool = False) -> Source:
    """Open a checkpoint of `save_checkpoint`: the folder itself, or the folder that its `latest` tag names.

    Args:
        folder: the checkpoint's folder.
        trust_pickle: also read classes that are not known to be harmless. They may run code.

    Raises:
        CheckpointError: no checkpoint is there; or it is damaged, holds other classes, or was not split by ZeRO alone.
    """
    found = find_deepspeed(folder)
    if found is None:
        raise CheckpointError(f"{folder} has no *_model_states.pt, so it is no checkpoint of DeepSpeed.")
    files = _open_files(found, trust_pickle=trust_pickle)
    model, optimizers = files.models[0], files.optimizers
    if not isinstance(model.get("module"), Mapping):
        raise CheckpointError(f"{found} has no module in its model file. DeepSpeed's save_checkpoint did not write it.")
    notes: list[str] = []
    groups = _trained_groups(files) if optimizers else plain_groups(model, notes)
    # Tied names come from tensors that share memory in the file, and from DeepSpeed's own record.
    tied = {**names_of_same_memory(model["module"]), **(model.get("shared_params") or {})}
    return Source(
        folder=found,
        model_class="model",  # DeepSpeed does not record the class's name
        tensors=_tensors(files, groups, tied),
        tied=tied,
        origin={
            "format": "DeepSpeed",
            "zero_stage": int(optimizers[0]["optimizer_state_dict"].get("zero_stage", 0)) if optimizers else 0,
            "processes": model.get("dp_world_size", 1),
            "versions": {"deepspeed": model.get("ds_version")},
        },
        optimizer=_optimizer_record(files, groups) if groups else None,
        extra_states={
            name.removesuffix(_EXTRA_STATE).rstrip("."): state
            for name, state in model["module"].items()
            if name.split(".")[-1] == _EXTRA_STATE and not isinstance(state, Tensor)
        },
        scheduler_states=[_scheduler_state(model["lr_scheduler"])] if model.get("lr_scheduler") else [],
        notes=notes,
    )


def _tensors(files: _Files, groups: Iterable[_TrainedGroup], tied: Mapping[str, str]) -> dict[tuple[str, str], Stored]:
    module = files.models[0]["module"]
    tensors: dict[tuple[str, str], Stored] = {}
    for group in groups:
        tensors |= group.tensors
        for name in group.parameters:
            weight, master_weight = module[name], group.tensors[MASTER_WEIGHT, name]
            if weight.dtype == master_weight.dtype:
                tensors[WEIGHT, name] = tensors.pop((MASTER_WEIGHT, name))
            elif weight.numel() == math.prod(master_weight.shape):
                tensors[WEIGHT, name] = Stored.of(weight)
            else:  # the file has no more than a part of the weight (stage 3)
                tensors[WEIGHT, name] = master_weight.cast(weight.dtype)
    frozen = files.models[0].get("frozen_param_shapes") or {}
    for name, tensor in module.items():
        if (WEIGHT, name) in tensors or name in tied or not isinstance(tensor, Tensor):
            continue
        shape = tuple(frozen.get(name, tensor.shape))
        if tensor.numel() == math.prod(shape):
            tensors[WEIGHT, name] = Stored.of(tensor)
        else:  # a frozen parameter at stage 3: each rank's file has one fragment
            [(_, _, pieces)] = _equal_pieces({name: shape}, len(files.models))
            fragments = [model["frozen_param_fragments"][name] for model in files.models]
            tensors[WEIGHT, name] = _join_pieces(name, shape, fragments, pieces)
    return tensors


def _optimizer_record(files: _Files, groups: list[_TrainedGroup]) -> dict[str, Any]:
    model = files.models[0]
    saved = files.optimizers[0]["optimizer_state_dict"] if files.optimizers else model["optimizer"]
    return {
        "algorithm": _algorithm(groups[0].settings, model.get("ds_config") or {}),
        "groups": [
            {
                "params": group.parameters,
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
    """Return the optimizer's name as in `algorithm_of`. None if unknown, as for a CPU kernel that the script built."""
    section = config.get("optimizer") if isinstance(config, Mapping) else None
    if section:
        name = str(section["type"]).lower()
        decoupled = section.get("params", {}).get("adam_w_mode", True)  # DeepSpeed's Adam is AdamW unless this is off
        return "adamw" if name == "adam" and decoupled else name
    if "decoupled_weight_decay" in settings:
        return "adamw" if settings["decoupled_weight_decay"] else "adam"
    return "sgd" if "nesterov" in settings else None


def _loss_scale(scaler: Mapping[str, Any]) -> dict[str, float]:
    if "last_overflow_iter" not in scaler:
        return {}  # a fixed loss scale, or none
    return {
        "value": float(scaler["cur_scale"]),
        "good_steps": scaler["cur_iter"] - scaler["last_overflow_iter"] - 1,
        "patience": scaler.get("cur_hysteresis", 1),
    }


def _scheduler_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a learning-rate scheduler's state for the torch scheduler that replaces DeepSpeed's."""
    if "last_batch_iteration" in state and "last_epoch" not in state:
        return {"last_epoch": state["last_batch_iteration"] + 1}  # DeepSpeed counts from -1, torch from 0
    return dict(state)


def _open_files(folder: Path, *, trust_pickle: bool) -> _Files:
    """Open all files of a checkpoint.

    Raises:
        CheckpointError: a file is missing or damaged, or its contents are not supported; or the model was split by
            something other than ZeRO.
    """
    names = sorted(path.name for path in folder.iterdir())
    if any(name.startswith("layer_") for name in names):
        raise CheckpointError(
            f"{folder} is from pipeline parallelism or DeepSpeed's experts (layer_*), which cannot be imported."
        )
    if (folder / "offloaded_tensors").is_dir():
        raise CheckpointError(
            f"{folder} has optimizer states in offloaded_tensors/, written by NVMe offload. They cannot be imported."
        )
    models = {match[1] or "0": match for name in names if (match := _MODEL_FILE.fullmatch(name))}
    optimizers = {match[1]: match for name in names if (match := _OPTIMIZER_FILE.fullmatch(name))}
    split = {match[2] for match in (*models.values(), *optimizers.values())} - {"00"}
    if split:
        raise CheckpointError(f"{folder} is from a model that was split by tensor parallelism (mp_rank_{split.pop()}).")

    def opened(found: Mapping[str, re.Match[str]], what: str) -> tuple[Mapping[str, Any], ...]:
        for rank in range(len(found)):
            if str(rank) not in found:
                raise CheckpointError(f"{folder} has {len(found)} {what} files, and none of rank {rank}.")
        names = [found[str(rank)][0] for rank in range(len(found))]
        return tuple(_open_pickle(folder / name, trust_pickle=trust_pickle) for name in names)

    return _Files(folder, opened(models, "model"), opened(optimizers, "optimizer"))


def _open_pickle(path: Path, *, trust_pickle: bool) -> dict[str, Any]:
    """Read a file of `torch.save`, with its tensors mapped from the file.

    Args:
        path: the file.
        trust_pickle: build all classes that the file names. This may run any code in the file.

    Raises:
        CheckpointError: the file is damaged, or names classes other than tensors, containers and DeepSpeed's own.
    """
    try:
        with torch.serialization.safe_globals([*NUMPY_CLASSES, *_STAND_INS]):
            unknown = [] if trust_pickle else torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
            if unknown:
                names = ", ".join(sorted(unknown))
                raise CheckpointError(f"{path} is a pickle that names {names}. Reading it may run any code.\n{_TRUST}")
            content = torch.load(str(path), "cpu", mmap=True, weights_only=not trust_pickle)
    except pickle.UnpicklingError as error:
        why = str(error).splitlines()[0]
        raise CheckpointError(
            f"{path} is a pickle that cannot be read without running its code ({why}).\n{_TRUST}"
        ) from error
    except (OSError, RuntimeError, ValueError, EOFError, AttributeError, ImportError) as error:
        raise CheckpointError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a dict. DeepSpeed did not write it.")
    return content


def _trained_groups(files: _Files) -> list[_TrainedGroup]:
    """Read the parameter groups of a checkpoint with ZeRO.

    At stages 1 and 2, a flat buffer holds a group's parameters one after another and is cut into equal parts, one for
    each rank. At stage 3, each rank has a flat buffer for each sub-group, which holds an equal partition of every
    parameter (DeepSpeed, `runtime/zero/stage_1_and_2.py` and `stage3.py`, `state_dict`).

    Raises:
        CheckpointError: files of some ranks are missing, or their parts do not add up to complete parameters.
    """
    saved = [file["optimizer_state_dict"] for file in files.optimizers]
    counts = saved[0].get("partition_count", len(saved))
    world_size = max(counts) if isinstance(counts, list | tuple) else counts
    if len(saved) != world_size:
        raise CheckpointError(
            f"{files.folder} has the optimizer files of {len(saved)} of the {world_size} processes that wrote it."
        )
    if "fp32_flat_groups" in saved[0]:
        return _partitioned_groups(files, saved)
    if "single_partition_of_fp32_groups" in saved[0]:
        return _flat_groups(files, saved)
    raise CheckpointError(f"{files.folder} holds no 32-bit weights: its optimizer files are of an unknown layout.")


def _flat_groups(files: _Files, saved: Sequence[Mapping[str, Any]]) -> list[_TrainedGroup]:
    module, known = files.models[0]["module"], files.models[0].get("param_shapes")
    base = [_base_states(entry["base_optimizer_state"]) for entry in saved]
    groups = []
    for index, settings in enumerate(base[0][1]):
        group = _TrainedGroup(settings)
        flats = [entry["single_partition_of_fp32_groups"][index] for entry in saved]
        states = [states.get(index, {}) for states, _ in base]
        if known:
            paddings = saved[0].get("param_alignment_paddings", [()] * (index + 1))[index]
            placed = _in_order(known[index], paddings, [flat.numel() for flat in flats])
        else:  # stage 0 in bf16
            placed = _as_mapped([entry["param_slice_mappings"][index] for entry in saved], module)
        for name, shape, pieces in placed:
            group.add(name, shape, flats, states, pieces)
        groups.append(group)
    return groups


def _in_order(
    shapes: Mapping[str, Any], paddings: Sequence[int], sizes: Sequence[int]
) -> Iterator[tuple[str, tuple[int, ...], list[_Piece]]]:
    """Locate parameters that follow each other in a buffer cut into equal parts. The last parts may be shorter.

    The slice mappings in the files cannot be used: they ignore the parameter order of `round_robin_gradients`.
    """
    begin = 0
    for (name, shape), padding in zip(shapes.items(), chain(paddings, repeat(0)), strict=False):
        end = begin + math.prod(shape)
        pieces = []
        for rank in range(len(sizes)):
            first = rank * sizes[0]
            start, stop = max(begin, first), min(end, first + sizes[rank])
            if start < stop:
                pieces.append((rank, slice(start - first, stop - first)))
        yield name, tuple(shape), pieces
        begin = end + padding


def _as_mapped(
    mappings: Sequence[Mapping[str, Any]], module: Mapping[str, Tensor]
) -> Iterator[tuple[str, tuple[int, ...], list[_Piece]]]:
    """Locate parameters by the slice mappings in each rank's file."""
    for name in dict.fromkeys(name for mapping in mappings for name in mapping):
        found = [(rank, mapping[name]) for rank, mapping in enumerate(mappings) if name in mapping]
        pieces = [(rank, slice(part.start, part.start + part.numel)) for rank, part in found]
        yield name, tuple(module[name].shape), pieces


def _partitioned_groups(files: _Files, saved: Sequence[Mapping[str, Any]]) -> list[_TrainedGroup]:
    base = [_base_states(entry["optimizer_state_dict"]) for entry in saved]
    groups = [_TrainedGroup(settings) for settings in base[0][1]]
    group_of = {index: group for group in groups for index in group.settings["params"]}
    for index, shapes in enumerate(files.models[0]["param_shapes"]):
        flats = [entry["fp32_flat_groups"][index] for entry in saved]
        states = [states.get(index, {}) for states, _ in base]
        for name, shape, pieces in _equal_pieces(shapes, len(saved)):
            group_of[index].add(name, shape, flats, states, pieces)
    return groups


def _equal_pieces(shapes: Mapping[str, Any], world_size: int) -> Iterator[tuple[str, tuple[int, ...], list[_Piece]]]:
    """Locate parameters that are split equally over the buffers of all ranks. The last pieces are padded."""
    offset = 0
    for name, shape in shapes.items():
        count = math.prod(shape)
        size = -(-count // world_size)
        counts = [max(0, min(size, count - rank * size)) for rank in range(world_size)]
        yield name, tuple(shape), [(rank, slice(offset, offset + own)) for rank, own in enumerate(counts)]
        offset += size


def _base_states(saved: Any) -> tuple[Mapping[int, Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
    """Return states by index, and groups. DeepSpeed's elastic form has only the states."""
    if isinstance(saved, list):
        return dict(enumerate(saved)), [{} for _ in saved]
    return saved["state"], saved["param_groups"]


def _join_pieces(name: str, shape: tuple[int, ...], flats: Sequence[Tensor], pieces: Sequence[_Piece]) -> Stored:
    """Return the unpartitioned tensor. Raise CheckpointError if elements are missing."""
    parts = tuple(flats[rank].detach().reshape(-1)[where] for rank, where in pieces)
    found, wanted = sum(part.numel() for part in parts), math.prod(shape)
    if found != wanted:
        raise CheckpointError(f"the ranks' files hold {found:,} elements of {name}, which has {wanted:,}.")
    return Stored(shape, parts[0].dtype, parts)


def plain_groups(model: Mapping[str, Any], notes: list[str]) -> list[_TrainedGroup]:
    """Return the parameter groups; none, with a note, if the states cannot be assigned to parameters.

    Args:
        model: the content of the model's file.
        notes: gets a note for each part that cannot be read.
    """
    saved = model.get("optimizer")
    if not saved:
        notes.append("the checkpoint has no optimizer")
        return []
    parameters = _parameters(model)
    if named := [str(key) for key in saved.get("state", ()) if not isinstance(key, int)]:
        notes.append(f"the optimizer's named states: {', '.join(named)}")
    has_copies = "fp32_groups_flat" in saved or "fp32_groups" in saved
    groups = _copied_groups(saved, parameters) if has_copies else _torch_groups(saved, parameters)
    if groups is None:
        notes.append(
            "the optimizer's states: without ZeRO, DeepSpeed stores them without the parameters' names; several groups "
            "or frozen parameters have equal shapes, so the states cannot be assigned"
        )
    return groups or []


def _parameters(model: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors that may be trained, in the model's order, each shared tensor once."""
    buffers = set(model.get("buffer_names") or ())
    found = {
        name: tensor
        for name, tensor in model["module"].items()
        if name not in buffers and isinstance(tensor, Tensor) and tensor.is_floating_point()
    }
    shared = names_of_same_memory(found)
    return {name: tensor for name, tensor in found.items() if name not in shared}


def _torch_groups(saved: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> list[_TrainedGroup] | None:
    """Read the groups of a plain torch optimizer, which steps the module's own weights."""
    indices = [index for settings in saved["param_groups"] for index in settings["params"]]
    shapes = {index: _shape_of(saved["state"].get(index, {})) for index in indices}
    names = _names_by_shape(saved["param_groups"], shapes, parameters)
    if names is None:
        return None
    groups = []
    for settings in saved["param_groups"]:
        group = _TrainedGroup(settings)
        for index in settings["params"]:
            name, tensor = names[index], parameters[names[index]]
            group.tensors[MASTER_WEIGHT, name] = Stored.of(tensor)
            for key, value in saved["state"].get(index, {}).items():
                if isinstance(value, Tensor) and value.ndim and key != "step":
                    group.tensors[key, name] = Stored.of(value)
                elif isinstance(value, Tensor | int | float):
                    group.scalars.setdefault(name, {})[key] = value.item() if isinstance(value, Tensor) else value
        groups.append(group)
    return groups


def _names_by_shape(
    groups: Sequence[Mapping[str, Any]], shapes: Mapping[int, torch.Size | None], parameters: Mapping[str, Tensor]
) -> dict[int, str] | None:
    """Return the parameter of each index: by name if the state has names, otherwise by position; None if ambiguous.

    The position is certain if one group holds all parameters. It is also certain if each shape occurs in one group
    only, as often as in the model.
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


def _copied_groups(saved: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> list[_TrainedGroup] | None:
    """Read groups from fp32 copies: one flat buffer for each group, or one copy for each parameter.

    The copies have no names. Rounded to the weights' dtype, a copy equals its parameter, which identifies it.
    """
    base = saved["optimizer_state_dict"]
    left = dict(parameters)
    groups = []
    for number, settings in enumerate(base["param_groups"]):
        group = _TrainedGroup(settings)
        joined = saved["fp32_groups_flat"][number : number + 1] if "fp32_groups_flat" in saved else None
        for index, copy in zip(settings["params"], joined or saved["fp32_groups"][number], strict=True):
            flat = copy.detach().reshape(-1)
            states = [base["state"].get(index, {})]
            offset = 0
            while offset < flat.numel():
                name = next((name for name, tensor in left.items() if _is_at(tensor, flat, offset)), None)
                if name is None:
                    return None
                tensor = left.pop(name)
                group.add(name, tuple(tensor.shape), [flat], states, [(0, slice(offset, offset + tensor.numel()))])
                offset += tensor.numel()
        groups.append(group)
    return groups


def _is_at(tensor: Tensor, flat: Tensor, offset: int) -> bool:
    piece = flat[offset : offset + tensor.numel()]
    return piece.numel() == tensor.numel() > 0 and torch.equal(piece.to(tensor.dtype), tensor.reshape(-1))


def _shape_of(state: Mapping[str, Any]) -> torch.Size | None:
    return next((value.shape for key, value in state.items() if isinstance(value, Tensor) and key != "step"), None)
