"""Opens the files of a DeepSpeed checkpoint: pickles, of which only harmless classes are built, mapped into memory."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from zero_plugin.checkpoint.objects import NUMPY_CLASSES
from zero_plugin.errors import CheckpointError

__all__ = ["DeepSpeedFiles", "Record", "list_deepspeed_files", "open_pickle"]

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
