"""Writes weights as a Hugging Face model folder, or as one safetensors file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import torch

from zero_plugin.checkpoint.convert.output import (
    Progress,
    copy_configuration,
    describe_stored,
    new_folder,
    refuse_existing,
    write_tensors,
)
from zero_plugin.checkpoint.convert.source import Source
from zero_plugin.checkpoint.durable import sync_folder, write_text
from zero_plugin.checkpoint.layout import SINGLE_NAME, index_file, plan_layout
from zero_plugin.errors import CheckpointError
from zero_plugin.strategies.fragments import WEIGHT

__all__ = ["write_model", "write_single_file"]

_ENDLESS: Final = 2**63


def write_model(
    source: Source,
    target: Path,
    *,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    overwrite: bool,
    progress: Progress,
) -> None:
    """Write a folder for `from_pretrained`: weights, and the configuration that lies beside those of the source.

    Args:
        source: what to write.
        target: the folder.
        dtype: of the floating weights; 32-bit ones are the masters. None: as they are.
        max_shard_bytes: of a weight file.
        overwrite: see `new_folder`.
        progress: told the bytes that were written.

    Raises:
        CheckpointError: see `new_folder`.
    """
    tensors = {(WEIGHT, name): stored for name, stored in source.weights(dtype).items()}
    layout = plan_layout(describe_stored(tensors), "", max_shard_bytes=max_shard_bytes, tied=source.tied)
    with new_folder(target, sum(layout.sizes.values()), overwrite=overwrite) as draft:
        write_tensors(draft, layout, tensors, progress, summed=False)
        if layout.index is not None:
            write_text(draft / index_file(""), layout.index)
        copy_configuration(source.folder, draft)
        if dtype is not None and (draft / "config.json").is_file():
            _name_dtype(draft / "config.json", str(dtype).removeprefix("torch."))


def write_single_file(
    source: Source, target: Path, *, dtype: torch.dtype | None, overwrite: bool, progress: Progress
) -> None:
    """Write all weights into one safetensors file; arguments and errors as of `write_model`."""
    if target.suffix != ".safetensors" or target.is_dir():
        raise CheckpointError(f"{target} is to be one file.\nGive it a name that ends with .safetensors.")
    refuse_existing(target, overwrite=overwrite)
    folder = target.with_name(f".{target.name}.folder")
    write_model(source, folder, dtype=dtype, max_shard_bytes=_ENDLESS, overwrite=True, progress=progress)
    (folder / SINGLE_NAME).replace(target)
    sync_folder(target.parent)
    for left in folder.iterdir():
        left.unlink()
    folder.rmdir()


def _name_dtype(config: Path, name: str) -> None:
    content = json.loads(config.read_text(encoding="utf-8"))
    for key in {"dtype", "torch_dtype"}.intersection(content) or {"dtype"}:  # the latter before transformers 4.56
        content[key] = name
    write_text(config, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
