"""Reads this package's checkpoints, and Hugging Face model folders, for a conversion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zero_plugin.checkpoint.convert.source import Source, map_tensor
from zero_plugin.checkpoint.folders import choose_checkpoint
from zero_plugin.checkpoint.manifest import read_manifest
from zero_plugin.checkpoint.model_folder import read_model_folder
from zero_plugin.checkpoint.nested_file import read_nested
from zero_plugin.errors import CheckpointError
from zero_plugin.strategies.fragments import WEIGHT

__all__ = ["open_checkpoint", "open_model"]


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
