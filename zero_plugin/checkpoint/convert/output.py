"""Where a conversion writes: aside, with enough room, and under its name when it is complete."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from zero_plugin.checkpoint.convert.source import Stored
from zero_plugin.checkpoint.durable import sync_file
from zero_plugin.checkpoint.folders import discard_draft, open_draft, publish_draft
from zero_plugin.checkpoint.layout import Description, Layout
from zero_plugin.checkpoint.ranges import open_writer
from zero_plugin.checkpoint.recognise import recognise
from zero_plugin.checkpoint.save import create_files
from zero_plugin.errors import CheckpointError
from zero_plugin.strategies.fragments import Fragment

__all__ = ["Progress", "copy_configuration", "describe_stored", "new_folder", "refuse_existing", "write_tensors"]

Progress = Callable[[int], None]  # called with the bytes that were read since the last call

_SMALL_BYTES: Final = 2**24  # room for what is not tensors
# What goes along with a model's weights: configuration and tokenizer.
_CONFIGURATION: Final = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.jinja",
)


@contextmanager
def new_folder(target: Path, tensor_bytes: int, *, overwrite: bool) -> Iterator[Path]:
    """A folder beside `target` to write into, which becomes `target` at the end, or is removed where that fails.

    Args:
        target: the folder to make.
        tensor_bytes: how much is going to be written.
        overwrite: replace a checkpoint or model that is there. A folder of anything else is never replaced.

    Raises:
        CheckpointError: `target` is there, its disk has too little room, or cannot be written.
    """
    refuse_existing(target, overwrite=overwrite)
    draft = open_draft(target, tensor_bytes + _SMALL_BYTES)
    older = target.with_name(f".{target.name}.older")
    try:
        yield draft
        if target.is_dir():
            target.rename(older)
        publish_draft(draft, target)
    except BaseException:
        discard_draft(draft)
        if older.is_dir() and not target.is_dir():
            older.rename(target)
        raise
    shutil.rmtree(older, ignore_errors=True)


def refuse_existing(target: Path, *, overwrite: bool) -> None:
    """See `new_folder`; of a file, anything may be replaced."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise CheckpointError(f"{target} exists already.\nName another place, or replace it with --overwrite.")
    if target.is_dir() and recognise(target) is None:
        raise CheckpointError(
            f"{target} is neither a checkpoint nor a model, so --overwrite does not remove it.\nName another folder."
        )


def describe_stored(tensors: Mapping[tuple[str, str], Stored]) -> list[Description]:
    """The tensors, for `plan_layout`."""
    return [Description(kind, name, stored.dtype, stored.shape) for (kind, name), stored in tensors.items()]


def write_tensors(
    draft: Path, layout: Layout, tensors: Mapping[tuple[str, str], Stored], progress: Progress, *, summed: bool
) -> Tensor:
    """Write tensor files, of which no more than a staging buffer is ever in memory.

    Args:
        draft: the folder.
        layout: where each tensor goes.
        tensors: by kind and name.
        progress: told what was written.
        summed: whether checksums are wanted.

    Returns:
        The two sums of each of the layout's places, in their order (`sum_words`); int64 of shape (places, 2).
    """
    create_files(draft, [layout])
    sums = torch.zeros(len(layout.places), 2, dtype=torch.int64)
    with open_writer(draft) as writer:
        for row, (key, place) in enumerate(layout.places.items()):
            for start, values in tensors[key].chunks():
                fragment = Fragment(*key, place.shape, start, values, (0, values.numel()))
                sums[row] += writer.write(fragment, place, summed=summed)
                progress(values.numel() * place.dtype.itemsize)
        writer.sync()
    return sums


def copy_configuration(source: Path, draft: Path) -> None:
    """Copy what configures a model and its tokenizer, where there is such."""
    found = sorted({path for pattern in _CONFIGURATION for path in source.glob(pattern) if path.is_file()})
    for path in found:
        shutil.copyfile(path, draft / path.name)
        sync_file(draft / path.name)
