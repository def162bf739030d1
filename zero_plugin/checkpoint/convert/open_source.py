"""Opens whatever a folder holds for a conversion: checkpoints of this package or DeepSpeed's, and model folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zero_plugin.checkpoint.convert.deepspeed import open_deepspeed
from zero_plugin.checkpoint.convert.source import Source, map_tensor
from zero_plugin.checkpoint.folders import choose_checkpoint
from zero_plugin.checkpoint.manifest import KINDS, read_manifest, recognise
from zero_plugin.checkpoint.objects import read_nested
from zero_plugin.errors import CheckpointError
from zero_plugin.tensors.fragments import WEIGHT
from zero_plugin.tensors.model_folder import read_model_folder


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
