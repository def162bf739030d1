"""Writes what was read from another format as a checkpoint of this package, which `load_state` goes on from."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from zero_plugin.checkpoint.convert.output import (
    Progress,
    copy_configuration,
    describe_stored,
    new_folder,
    write_tensors,
)
from zero_plugin.checkpoint.convert.source import Source
from zero_plugin.checkpoint.durable import write_text
from zero_plugin.checkpoint.layout import index_file, plan_layout
from zero_plugin.checkpoint.manifest import Manifest, StoredModel, list_files
from zero_plugin.checkpoint.nested_file import write_nested

__all__ = ["write_checkpoint"]

_TOGETHER: Final = ("versions", "processes")


def write_checkpoint(
    source: Source, target: Path, *, max_shard_bytes: int, overwrite: bool, progress: Progress
) -> None:
    """Write a checkpoint of one model; complete, or not at all.

    There are no random states, loaders and registered objects in it, for other formats have none: `load_state` says so.

    Args:
        source: what to write.
        target: the folder.
        max_shard_bytes: of a weight file.
        overwrite: see `new_folder`.
        progress: told the bytes that were written.

    Raises:
        CheckpointError: see `new_folder`.
    """
    layout = plan_layout(describe_stored(source.tensors), "", max_shard_bytes=max_shard_bytes, tied=source.tied)
    model = {"class": source.model_class, "extra_states": source.extra_states, "optimizer": source.optimizer}
    training = {
        "models": [model],
        "waiting_optimizers": [],
        "schedules": list(source.schedules),
        "loaders": [],
        "iteration": 0,
    }
    with new_folder(target, sum(layout.sizes.values()), overwrite=overwrite) as draft:
        sums = write_tensors(draft, layout, source.tensors, progress, summed=True)
        if layout.index is not None:
            write_text(draft / index_file(""), layout.index)
        copy_configuration(source.folder, draft)
        write_nested(training, draft / "training", what="training")
        write_nested([], draft / "random", what="random")
        write_nested(None, draft / "objects", what="objects")
        about = {
            "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            **{key: source.origin.get(key) for key in _TOGETHER},
            "imported": dict(source.origin),
        }
        stored = StoredModel.with_sums(source.model_class, "", source.tied, layout.places, sums)
        Manifest(about, [stored], list_files(draft, layout.sizes)).write(draft)
