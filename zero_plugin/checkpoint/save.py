"""Writes a checkpoint: every process its own ranges, then the main process what is small, the manifest and the name.

Also the states of Python's, NumPy's and torch's random number generators, of every process.
"""

from __future__ import annotations

import hashlib
import math
import random
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zero_plugin.checkpoint.folders import discard_draft, open_draft, publish_draft
from zero_plugin.checkpoint.layout import (
    ASK_TO_REPORT,
    Layout,
    describe,
    described_fragments,
    placed_fragments,
    plan_layout,
)
from zero_plugin.checkpoint.manifest import Manifest, StoredModel, checksum_of_file
from zero_plugin.checkpoint.objects import EncodedTree, encode_nested
from zero_plugin.checkpoint.ranges import open_writer
from zero_plugin.checkpoint.shared_folder import refuse_separate_folders
from zero_plugin.distributed import collectives
from zero_plugin.distributed.collectives import SCRIPT, Peers, all_or_none, on_main
from zero_plugin.distributed.seeding import seed_torch
from zero_plugin.errors import CheckpointError
from zero_plugin.machine.durable_files import reserve, sync_file, write_text
from zero_plugin.strategies.base import Session
from zero_plugin.tensors.fragments import WEIGHT, Fragment
from zero_plugin.tensors.modules import shared_names

_SMALL_BYTES = 2**24  # on the disk, for what is not a model's tensors


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


@dataclass(slots=True)
class OpenCheckpoint:
    """A checkpoint that lacks the models' tensors, and what makes it complete. The sessions are not needed for that.

    Attributes:
        target: its folder in the end.
        draft: its folder until then.
        models: class, folder and tied names of each.
        layouts: where each one's tensors go.
        replaces: whether a checkpoint that has the name of `target` in the end is replaced.
        about: for the manifest; on the main process.
        trees: file's path without ending → what goes into it; on the main process.
    """

    target: Path
    draft: Path
    models: Sequence[tuple[str, str, Mapping[str, str]]]
    layouts: Sequence[Layout]
    replaces: bool = True
    about: Mapping[str, Any] = field(default_factory=dict)
    trees: Mapping[str, EncodedTree] = field(default_factory=dict)

    def write(self, fragments: Iterable[Iterable[Fragment]], peers: Peers) -> None:
        """Write it, complete or not at all. Collective.

        Args:
            fragments: of each model.
            peers: what the calling thread reaches the other processes through.

        Raises:
            CheckpointError: on every process; what was in `target` is as it was.
        """
        try:
            parts = zip(fragments, self.layouts, strict=True)
            written = all_or_none(lambda: write_fragments(self.draft, parts), peers)
            summed = [peers.sum(rows) for rows in written]
            all_or_none(lambda: self._complete(summed) if peers.is_main else None, peers)
        except BaseException:
            self.discard(peers)
            raise

    def discard(self, peers: Peers) -> None:
        """Remove what there is of it."""
        if peers.is_main:
            discard_draft(self.draft)

    def _complete(self, written: Sequence[Tensor]) -> None:
        complete_draft(self.draft, self.about, self.models, zip(self.layouts, written, strict=True), self.trees)
        publish_draft(self.draft, self.target, replaces=self.replaces)


def open_checkpoint(
    target: Path,
    sessions: Sequence[Session],
    make_draft: Callable[[], Draft],
    *,
    max_shard_bytes: int,
    run_hooks: Callable[[Path], Sequence[int]],
    replaces: bool = True,
) -> OpenCheckpoint:
    """Begin a checkpoint: everything but the models' tensors is decided and collected. Collective.

    Args:
        target: the folder.
        sessions: of all prepared models, in their order.
        make_draft: called on the main process, after the hooks.
        max_shard_bytes: of a weight file.
        run_hooks: called on every process with the folder that is being written; which sessions' weights it has stored
            by itself.
        replaces: whether a checkpoint that has the name of `target` in the end is replaced.

    Raises:
        CheckpointError: on every process; nothing of it is left.
    """
    models = [
        (type(session.module).__name__, f"model_{index}/" if index else "", shared_names(session.module))
        for index, session in enumerate(sessions)
    ]

    def plan(stored_by_hooks: Sequence[int]) -> list[Layout]:
        layouts = []
        for index, (session, (_, folder, tied)) in enumerate(zip(sessions, models, strict=True)):
            found = describe(described_fragments(session))
            found = [one for one in found if one.kind != WEIGHT or index not in stored_by_hooks]
            layouts.append(plan_layout(found, folder, max_shard_bytes=max_shard_bytes, tied=tied))
        return layouts

    layouts = all_or_none(lambda: plan(()))
    agree_on(layouts)
    draft = on_main(lambda: open_draft(target, _needed_bytes(layouts)))
    opened = OpenCheckpoint(target, draft, models, layouts, replaces)

    def begin() -> None:
        create_files(draft, opened.layouts)
        contents = make_draft()
        contents.write_more(draft)
        opened.about = contents.about
        opened.trees = {stem: encode_nested(tree, what=stem) for stem, tree in contents.trees.items()}

    try:
        refuse_separate_folders(draft)
        if stored_by_hooks := run_hooks(draft):
            opened.layouts = all_or_none(lambda: plan(stored_by_hooks))
        all_or_none(lambda: begin() if SCRIPT.is_main else None)
    except BaseException:
        opened.discard(SCRIPT)
        raise
    return opened


def agree_on(layouts: Sequence[Layout]) -> None:
    """All processes must have the same tensors: each writes at offsets that it computed by itself. Collective.

    Raises:
        CheckpointError: they have not.
    """
    headers = b"".join(header for layout in layouts for _, header in sorted(layout.headers.items()))
    digests = collectives.gather_object([hashlib.sha256(headers).hexdigest()])
    differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if differing:
        raise CheckpointError(
            f"processes {differing} have other tensors than process 0 (names, shapes, types or optimizer states), so "
            "that no common checkpoint can be written. Every process has to build the same model."
        )


def _needed_bytes(layouts: Sequence[Layout]) -> int:
    return sum(size for layout in layouts for size in layout.sizes.values()) + _SMALL_BYTES


def refuse_gaps(layout: Layout, written: Tensor) -> None:
    """Refuse a draft in which not every element of every tensor was written once.

    Args:
        layout: of the tensors.
        written: int64, one for each of its places: how many elements all processes wrote.

    Raises:
        CheckpointError: it names the tensor.
    """
    for ((kind, name), place), count in zip(layout.places.items(), written.tolist(), strict=True):
        if count != math.prod(place.shape):
            raise CheckpointError(
                f"{count:,} elements of {name} ({kind}) were written, and it has {math.prod(place.shape):,}. "
                f"{ASK_TO_REPORT}"
            )


def create_files(draft: Path, layouts: Sequence[Layout]) -> None:
    """Make the tensor files in `draft`, at full size, for `write_fragments`; and the weights' index."""
    for layout in layouts:
        for file, header in layout.headers.items():
            path = draft / file
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as opened:
                # The size first: a client of NFS that writes at a file's end takes the rest of that page to be zeros,
                # and may write them over what another machine has written there.
                reserve(opened, layout.sizes[file])
                opened.write(header)
        if layout.index is not None:
            name, text = layout.index
            write_text(draft / name, text)


def write_fragments(
    draft: Path, parts: Iterable[tuple[Iterable[Fragment], Layout]], *, summed: bool = True
) -> list[Tensor]:
    """Write what of some models' fragments is this process' to write; the disk has it at the return.

    Args:
        draft: the folder, with the tensor files.
        parts: of each model, its fragments and their layout.
        summed: whether checksums are computed; else they are zeros.

    Returns:
        For each model one row for each of its places: the two sums (`sum_words`) and the number of elements of what was
        written.
    """
    written = []
    with open_writer(draft) as writer:
        for fragments, layout in parts:
            rows = {key: row for row, key in enumerate(layout.places)}
            table = torch.zeros(len(rows), 3, dtype=torch.int64)
            for fragment in placed_fragments(fragments, layout):
                key = fragment.kind, fragment.name
                table[rows[key], :2] += writer.write(fragment, layout.places[key], summed=summed)
                table[rows[key], 2] += fragment.written[1] - fragment.written[0]
            written.append(table)
        writer.sync()
    return written


def complete_draft(
    draft: Path,
    about: Mapping[str, Any],
    models: Sequence[tuple[str, str, Mapping[str, str]]],
    written: Iterable[tuple[Layout, Tensor]],
    trees: Mapping[str, EncodedTree],
) -> None:
    """Write what is small, and the manifest last, into a draft that has the models' tensors.

    Args:
        draft: the folder.
        about: for the manifest.
        models: class, folder and tied names of each.
        written: of each model, its layout and what all processes wrote, as `write_fragments` returns it.
        trees: file's path without ending → what goes into it.

    Raises:
        CheckpointError: the tensors are not complete.
    """
    stored = []
    sizes: dict[str, int] = {}
    for (kind, folder, tied), (layout, table) in zip(models, written, strict=True):
        refuse_gaps(layout, table[:, 2])
        sums = {key: (plain, placed) for key, (plain, placed, _) in zip(layout.places, table.tolist(), strict=True)}
        stored.append(StoredModel(kind, folder, tied, layout.places, sums))
        sizes |= layout.sizes
    for stem, tree in trees.items():
        tree.write(draft / stem)
    files: dict[str, tuple[int, int | None]] = {}
    for path in sorted(path for path in draft.rglob("*") if path.is_file()):
        name, size = str(path.relative_to(draft)), path.stat().st_size
        sync_file(path)  # also what hooks and libraries wrote; the manifest may only come when all else is there
        if size != sizes.get(name, size):
            raise CheckpointError(f"{path} has {size:,} bytes instead of {sizes[name]:,}.")
        files[name] = size, None if name in sizes else checksum_of_file(path)
    Manifest(about, stored, files).write(draft)


def random_state() -> dict[str, Any]:
    """This process' generators, as nested containers of arrays and tensors."""
    version, words, gauss = random.getstate()
    return {
        "python": (version, np.array(words, dtype=np.uint64), gauss),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if _uses_cuda() else None,
        "xla": sys.modules["torch_xla"].core.xla_model.get_rng_state() if "torch_xla" in sys.modules else None,
    }


def restore_random_state(saved: Sequence[Mapping[str, Any]], rank: int) -> str | None:
    """Resume drawing where a checkpoint was made; a sentence where this process cannot.

    A process that the checkpoint does not know draws as the first one where all saved ones drew alike, as after one
    `set_seed` for all. Else it begins anew, from a seed made of a saved process' state and its own rank.

    Args:
        saved: of each process that wrote the checkpoint.
        rank: of this process.
    """
    if not saved:
        return "random states: there are none in the checkpoint"  # it was imported
    if rank < len(saved):
        _restore(saved[rank])
        return None
    first = saved[0]
    if all(_same(first, other) for other in saved[1:]):
        _restore(first)
        return f"the random states of process {rank}, which was not there: it draws as the others do"
    other: Tensor = saved[rank % len(saved)]["torch"]
    seed = zlib.crc32(other.numpy().tobytes()) + rank
    random.seed(seed)
    np.random.seed(seed % 2**32)
    seed_torch(seed)
    return f"the random states of process {rank}, which was not there: it is seeded with {seed}"


def _uses_cuda() -> bool:
    """Whether CUDA has begun here: asking for its state would make a context, in a run on the CPU too."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _restore(state: Mapping[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(int(word) for word in words), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if state.get("xla") is not None and "torch_xla" in sys.modules:  # checkpoints of before have no such key
        sys.modules["torch_xla"].manual_seed(state["xla"])


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return (
        torch.equal(one["torch"], other["torch"])
        and np.array_equal(one["python"][1], other["python"][1])
        and np.array_equal(one["numpy"][1], other["numpy"][1])
    )
