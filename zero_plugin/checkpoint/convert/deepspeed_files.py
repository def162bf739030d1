"""The files of a DeepSpeed checkpoint, and where in them the pieces of each trained parameter and its states are.

They are pickles, of which only harmless classes are built, mapped into memory.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from zero_plugin.checkpoint.convert.source import Stored
from zero_plugin.checkpoint.objects import NUMPY_CLASSES
from zero_plugin.errors import CheckpointError

_OPTIMIZER_FILE: Final = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_TRUST: Final = "Where you trust whoever wrote it, give --trust_pickle."
_MODEL_FILE: Final = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")


class Record:
    """Stands for a plain object of DeepSpeed's: its attributes, and none of its code."""


# The classes of its own that DeepSpeed puts into checkpoints, and what they are read as.
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
class DeepSpeedFiles:
    """The files of one checkpoint, opened.

    Attributes:
        folder: where they are.
        models: of each rank where the model is partitioned (stage 3), else of the first alone.
        optimizers: of each rank; empty where ZeRO is off.
    """

    folder: Path
    models: tuple[Mapping[str, Any], ...]
    optimizers: tuple[Mapping[str, Any], ...]


def list_deepspeed_files(folder: Path, *, trust_pickle: bool) -> DeepSpeedFiles:
    """Open all files of a checkpoint.

    Raises:
        CheckpointError: one is missing or damaged, or holds what is not read; or the model was split otherwise than by
            ZeRO.
    """
    names = sorted(path.name for path in folder.iterdir())
    if any(name.startswith("layer_") for name in names):
        raise CheckpointError(f"{folder} is of a pipeline or of DeepSpeed's experts (layer_*): that is not imported.")
    if (folder / "offloaded_tensors").is_dir():
        raise CheckpointError(
            f"{folder} keeps optimizer states in offloaded_tensors/, as NVMe offload left them: that is not imported."
        )
    models = {match[1] or "0": match for name in names if (match := _MODEL_FILE.fullmatch(name))}
    optimizers = {match[1]: match for name in names if (match := _OPTIMIZER_FILE.fullmatch(name))}
    split = {match[2] for match in (*models.values(), *optimizers.values())} - {"00"}
    if split:
        raise CheckpointError(f"{folder} is of a model split by tensor parallelism (mp_rank_{split.pop()}).")

    def opened(found: Mapping[str, re.Match[str]], what: str) -> tuple[Mapping[str, Any], ...]:
        for rank in range(len(found)):
            if str(rank) not in found:
                raise CheckpointError(f"{folder} has {len(found)} {what} files, and none of rank {rank}.")
        return tuple(open_pickle(folder / found[str(rank)][0], trust_pickle=trust_pickle) for rank in range(len(found)))

    return DeepSpeedFiles(folder, opened(models, "model"), opened(optimizers, "optimizer"))


def open_pickle(path: Path, *, trust_pickle: bool) -> dict[str, Any]:
    """What `torch.save` wrote, its tensors mapped from the file.

    Args:
        path: of the file.
        trust_pickle: build whatever classes it names, which may run any code that it holds.

    Raises:
        CheckpointError: it is damaged, or names other classes than tensors, containers and DeepSpeed's own.
    """
    try:
        with torch.serialization.safe_globals([*NUMPY_CLASSES, *_STAND_INS]):
            unknown = [] if trust_pickle else torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
            if unknown:
                names = ", ".join(sorted(unknown))
                raise CheckpointError(f"{path} is a pickle that names {names}; reading it may run any code.\n{_TRUST}")
            content = torch.load(str(path), "cpu", mmap=True, weights_only=not trust_pickle)
    except pickle.UnpicklingError as error:
        why = str(error).splitlines()[0]
        raise CheckpointError(
            f"{path} is a pickle that cannot be read without running what it says ({why}).\n{_TRUST}"
        ) from error
    except (OSError, RuntimeError, ValueError, EOFError, AttributeError, ImportError) as error:
        raise CheckpointError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, no dict: it is not DeepSpeed's.")
    return content


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one parameter in the flat buffer of a rank: `count` elements from `start`."""

    rank: int
    start: int
    count: int


@dataclass(slots=True)
class TrainedGroup:
    """What one parameter group holds.

    Attributes:
        settings: as DeepSpeed has them: `lr`, `betas`, …
        master_weights: parameter → what the optimizer steps.
        states: parameter → state → tensor.
        scalars: parameter → state that is a number → its value.
    """

    settings: Mapping[str, Any]
    master_weights: dict[str, Stored] = field(default_factory=dict)
    states: dict[str, dict[str, Stored]] = field(default_factory=dict)
    scalars: dict[str, dict[str, float]] = field(default_factory=dict)

    def add(
        self,
        name: str,
        shape: tuple[int, ...],
        flats: Sequence[Tensor],
        states: Sequence[Mapping[str, Any]],
        pieces: Sequence[Piece],
    ) -> None:
        """Add a parameter: of each rank its flat buffer, and that buffer's states."""
        self.master_weights[name] = join_pieces(name, shape, flats, pieces)
        for key, first in states[0].items():
            if isinstance(first, Tensor) and first.ndim:
                own = self.states.setdefault(name, {})
                own[key] = join_pieces(name, shape, [state[key] for state in states], pieces)
            elif isinstance(first, Tensor | int | float):
                number = first.item() if isinstance(first, Tensor) else first
                self.scalars.setdefault(name, {})[key] = number


def trained_groups(files: DeepSpeedFiles) -> list[TrainedGroup]:
    """The parameter groups of a checkpoint with ZeRO.

    At stages 1 and 2 the parameters of a group lie one after another in a flat buffer, which is cut into equal parts,
    one for each rank. At stage 3 a rank has a flat buffer for each sub-group, with an equal partition of one parameter
    after another (DeepSpeed, `runtime/zero/stage_1_and_2.py` and `stage3.py`, `state_dict`).

    Raises:
        CheckpointError: files of ranks are missing, or do not make complete parameters.
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


def _flat_groups(files: DeepSpeedFiles, saved: Sequence[Mapping[str, Any]]) -> list[TrainedGroup]:
    module, known = files.models[0]["module"], files.models[0].get("param_shapes")
    base = [_base_states(entry["base_optimizer_state"]) for entry in saved]
    groups = []
    for index, settings in enumerate(base[0][1]):
        group = TrainedGroup(settings)
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
) -> Iterator[tuple[str, tuple[int, ...], list[Piece]]]:
    """Parameters one after another in a buffer that is cut into equal parts, of which the last ones may be shorter.

    The slice mappings in the files do not serve: they know nothing of the order of `round_robin_gradients`.
    """
    begin = 0
    for (name, shape), padding in zip(shapes.items(), chain(paddings, repeat(0)), strict=False):
        end = begin + math.prod(shape)
        pieces = []
        for rank in range(len(sizes)):
            first = rank * sizes[0]
            start, stop = max(begin, first), min(end, first + sizes[rank])
            if start < stop:
                pieces.append(Piece(rank, start - first, stop - start))
        yield name, tuple(shape), pieces
        begin = end + padding


def _as_mapped(
    mappings: Sequence[Mapping[str, Any]], module: Mapping[str, Tensor]
) -> Iterator[tuple[str, tuple[int, ...], list[Piece]]]:
    """Parameters where each rank's file says that they are."""
    for name in dict.fromkeys(name for mapping in mappings for name in mapping):
        pieces = [
            Piece(rank, mapping[name].start, mapping[name].numel)
            for rank, mapping in enumerate(mappings)
            if name in mapping
        ]
        yield name, tuple(module[name].shape), pieces


def _partitioned_groups(files: DeepSpeedFiles, saved: Sequence[Mapping[str, Any]]) -> list[TrainedGroup]:
    base = [_base_states(entry["optimizer_state_dict"]) for entry in saved]
    groups = [TrainedGroup(settings) for settings in base[0][1]]
    group_of = {index: group for group in groups for index in group.settings["params"]}
    for index, shapes in enumerate(files.models[0]["param_shapes"]):
        flats = [entry["fp32_flat_groups"][index] for entry in saved]
        states = [states.get(index, {}) for states, _ in base]
        for name, shape, pieces in equal_pieces(shapes, len(saved)):
            group_of[index].add(name, shape, flats, states, pieces)
    return groups


def equal_pieces(shapes: Mapping[str, Any], world_size: int) -> Iterator[tuple[str, tuple[int, ...], list[Piece]]]:
    """Parameters one after another, of each an equal piece in the buffer of every rank; the last ones are padded."""
    offset = 0
    for name, shape in shapes.items():
        count = math.prod(shape)
        size = -(-count // world_size)
        pieces = [Piece(rank, offset, max(0, min(size, count - rank * size))) for rank in range(world_size)]
        yield name, tuple(shape), pieces
        offset += size


def _base_states(saved: Any) -> tuple[Mapping[int, Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
    """States by index, and groups; DeepSpeed's elastic form has the states alone."""
    if isinstance(saved, list):
        return dict(enumerate(saved)), [{} for _ in saved]
    return saved["state"], saved["param_groups"]


def join_pieces(name: str, shape: tuple[int, ...], flats: Sequence[Tensor], pieces: Sequence[Piece]) -> Stored:
    """The unpartitioned tensor; raises CheckpointError where elements are missing."""
    parts = tuple(flats[piece.rank].detach().view(-1)[piece.start : piece.start + piece.count] for piece in pieces)
    found, wanted = sum(part.numel() for part in parts), math.prod(shape)
    if found != wanted:
        raise CheckpointError(f"the ranks' files hold {found:,} elements of {name}, which has {wanted:,}.")
    return Stored(shape, parts[0].dtype, parts)
