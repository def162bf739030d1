"""Writes a checkpoint: every process its own ranges, then the main process what is small, the manifest and the name."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_plugin import collectives
from zero_plugin.checkpoint.durable import reserve, sync_file, write_text
from zero_plugin.checkpoint.folders import open_draft, publish_draft
from zero_plugin.checkpoint.layout import Layout, describe, index_file, plan_layout
from zero_plugin.checkpoint.manifest import Manifest, StoredModel, checksum_of_file
from zero_plugin.checkpoint.nested_file import write_nested
from zero_plugin.checkpoint.ranges import open_writer
from zero_plugin.checkpoint.shared_folder import refuse_separate_folders
from zero_plugin.checkpoint.together import all_or_none, on_main
from zero_plugin.errors import CheckpointError
from zero_plugin.strategies.base import Session
from zero_plugin.strategies.fragments import WEIGHT, Fragment, with_masters
from zero_plugin.strategies.named_tensors import shared_names
from zero_plugin.strategies.optimizer_states import OptimizedPiece, state_fragments

__all__ = ["Draft", "agree_on", "create_files", "save_checkpoint", "session_fragments"]

_SMALL_BYTES = 2**24  # room for what is not a model's tensors


@dataclass(frozen=True, slots=True)
class Draft:
    """What goes into a checkpoint beside the models' tensors, on the main process.

    Attributes:
        about: for the manifest.
        trees: file's path without ending → nested containers.
        write_more: writes further files into the folder that it is given.
    """

    about: Mapping[str, Any]
    trees: Mapping[str, Any]
    write_more: Callable[[Path], None]


def session_fragments(
    session: Session, *, changing: bool = False, prepare: Callable[[list[OptimizedPiece]], None] = lambda _: None
) -> Iterator[Fragment]:
    """All tensors of a session, as they lie here; each may be used until the next is asked for.

    Args:
        session: of a model.
        changing: they are going to be changed, inside `session.reading()`.
        prepare: called with pieces that are in memory, before their fragments come.
    """
    weights = {fragment.name: fragment for fragment in session.weight_fragments()}
    for pieces in session.blocks(changing=changing):
        prepare(pieces)
        trained = [weights.pop(piece.name) for piece in pieces if piece.name in weights]
        yield from with_masters(trained, (piece.weight() for piece in pieces))
        yield from state_fragments(pieces)
    yield from session.fetched(weights.values(), changing=changing)


def save_checkpoint(
    target: Path,
    sessions: Sequence[Session],
    make_draft: Callable[[], Draft],
    *,
    max_shard_bytes: int,
    run_hooks: Callable[[Path], Sequence[int]],
) -> None:
    """Write a checkpoint into `target`, whole or not at all. Collective.

    Args:
        target: the folder.
        sessions: of all prepared models, in their order.
        make_draft: called on the main process, after the hooks.
        max_shard_bytes: of a weight file.
        run_hooks: called on every process with the folder that is being written; which sessions' weights it has stored
            by itself.

    Raises:
        CheckpointError: on every process; what was in `target` is as it was.
    """
    folders = [f"model_{index}/" if index else "" for index in range(len(sessions))]
    layouts = all_or_none(lambda: _plan(sessions, folders, max_shard_bytes, without_weights=()))
    agree_on(layouts)
    draft = on_main(lambda: open_draft(target, _needed_bytes(layouts)))
    try:
        refuse_separate_folders(draft)
        if stored_by_hooks := run_hooks(draft):
            layouts = all_or_none(lambda: _plan(sessions, folders, max_shard_bytes, without_weights=stored_by_hooks))
        on_main(lambda: create_files(draft, layouts))
        sums = all_or_none(lambda: _write_ranges(draft, sessions, layouts))
        summed = [collectives.reduce(part, "sum") for part in sums]
        models = [
            StoredModel.with_sums(
                type(session.module).__name__, folder, shared_names(session.module), layout.places, part
            )
            for session, folder, layout, part in zip(sessions, folders, layouts, summed, strict=True)
        ]
        on_main(lambda: _complete(draft, target, make_draft(), models, layouts))
    except BaseException:
        if collectives.process_index() == 0:
            shutil.rmtree(draft, ignore_errors=True)
        raise


def _plan(
    sessions: Sequence[Session], folders: Sequence[str], max_shard_bytes: int, without_weights: Sequence[int]
) -> list[Layout]:
    layouts = []
    for index, (session, folder) in enumerate(zip(sessions, folders, strict=True)):
        descriptions = describe(session_fragments(session))
        if index in without_weights:
            descriptions = [description for description in descriptions if description.kind != WEIGHT]
        tied = shared_names(session.module)
        layouts.append(plan_layout(descriptions, folder, max_shard_bytes=max_shard_bytes, tied=tied))
    return layouts


def agree_on(layouts: Sequence[Layout]) -> None:
    """All processes must have the same tensors: each writes at offsets that it computed by itself. Collective.

    Raises:
        CheckpointError: they have not.
    """
    heads = b"".join(head for layout in layouts for _, head in sorted(layout.heads.items()))
    digests = collectives.gather_object([hashlib.sha256(heads).hexdigest()])
    differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if differing:
        raise CheckpointError(
            f"processes {differing} have other tensors than process 0 (names, shapes, types or optimizer states), so "
            "that no common checkpoint can be written. Every process has to build the same model."
        )


def _needed_bytes(layouts: Sequence[Layout]) -> int:
    return sum(size for layout in layouts for size in layout.sizes.values()) + _SMALL_BYTES


def create_files(draft: Path, layouts: Sequence[Layout]) -> None:
    """Make the tensor files in `draft`, at full size, for `open_writer`."""
    for layout in layouts:
        for file, head in layout.heads.items():
            path = draft / file
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as opened:
                opened.write(head)
                reserve(opened, layout.sizes[file])


def _write_ranges(draft: Path, sessions: Sequence[Session], layouts: Sequence[Layout]) -> list[Tensor]:
    """The checksums of what this process wrote: for each model one row of two for each of its places."""
    sums = []
    with open_writer(draft) as writer:
        for session, layout in zip(sessions, layouts, strict=True):
            rows = {key: row for row, key in enumerate(layout.places)}
            part = torch.zeros(len(rows), 2, dtype=torch.int64)
            for fragment in session_fragments(session):
                place = layout.places.get((fragment.kind, fragment.name))
                if place is not None:
                    part[rows[fragment.kind, fragment.name]] += writer.write(fragment, place)
            sums.append(part)
        writer.sync()
    return sums


def _complete(
    draft: Path, target: Path, contents: Draft, models: Sequence[StoredModel], layouts: Sequence[Layout]
) -> None:
    for stem, tree in contents.trees.items():
        write_nested(tree, draft / stem, what=stem)
    for model, layout in zip(models, layouts, strict=True):
        if layout.index is not None:
            write_text(draft / index_file(model.folder), layout.index)
    contents.write_more(draft)
    sizes = {file: size for layout in layouts for file, size in layout.sizes.items()}
    files: dict[str, tuple[int, int | None]] = {}
    for path in sorted(path for path in draft.rglob("*") if path.is_file()):
        name = str(path.relative_to(draft))
        sync_file(path)  # also what hooks and libraries wrote; the manifest may only come when all else is on the disk
        files[name] = (path.stat().st_size, None if name in sizes else checksum_of_file(path))
        if name in sizes and files[name][0] != sizes[name]:
            raise CheckpointError(f"{path} has {files[name][0]:,} bytes instead of {sizes[name]:,}.")
    Manifest(contents.about, models, files).write(draft)
    publish_draft(draft, target)
