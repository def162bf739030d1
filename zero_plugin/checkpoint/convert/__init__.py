"""Converts checkpoints and models between other formats and this package's: piece by piece, without a GPU."""

from __future__ import annotations

from pathlib import Path

from zero_plugin.checkpoint.convert.deepspeed_files import open_deepspeed
from zero_plugin.checkpoint.convert.source import Source, open_checkpoint, open_model
from zero_plugin.checkpoint.summary import KINDS, recognise
from zero_plugin.errors import CheckpointError


def open_source(folder: Path, *, model: int | None = None, trust_pickle: bool = False) -> Source:
    """Open a checkpoint of this package or of DeepSpeed, or a model folder.

    Args:
        folder: the folder of the checkpoint or model.
        model: which of a checkpoint's models, see `open_checkpoint`.
        trust_pickle: see `open_deepspeed`.

    Raises:
        CheckpointError: the folder is none of these, or is damaged.
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
