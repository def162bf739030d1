"""Writes a checkpoint: every process its own ranges, then the main process what is small, the manifest and the name."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from zero_plugin.checkpoint.folders import (
    Manifest,
    checksum_of_file,
    discard_draft,
    open_draft,
    publish_draft,
)
from zero_plugin.checkpoint.objects import EncodedTree, encode_nested
from zero_plugin.checkpoint.tensor_files import (
    CHECKSUMS,
    Layout,
    complete_pieces,
    create_files,
    describe,
    described_fragments,
    plan_layout,
    write_fragments,
)
from zero_plugin.distributed import collectives
from zero_plugin.distributed.collectives import SCRIPT, Peers, all_or_none, on_main
from zero_plugin.distributed.messages import working
from zero_plugin.errors import CheckpointError
from zero_plugin.strategies.base import Session
from zero_plugin.tensors.modules import WEIGHT, Fragment, as_pretrained, shared_names

_SMALL_BYTES = 2**24  # on the disk, for what is not a model's tensors
_PROBE: Final = ".probe"
_MARK_BYTES: Final = 8  # side by side in one page, as the ends of ranges are
_found_shared: set[Path] = set()  # file systems do not change while a process runs


@dataclass(slots=True)
class OpenCheckpoint:
    """A checkpoint whose tensors are not written yet. Sessions are not needed to complete it.

    Attributes:
        target: the folder of the complete checkpoint.
        draft: the folder in which it is written.
        layouts: for each model, the files and positions of its tensors.
        replaces: whether a checkpoint that is in `target` when this one is complete is replaced.
        about: facts for the manifest; on the main process only.
        trees: the content of each other file by its path without suffix; on the main process only.
    """

    target: Path
    draft: Path
    layouts: Sequence[Layout]
    replaces: bool = True
    about: Mapping[str, Any] = field(default_factory=dict)
    trees: Mapping[str, EncodedTree] = field(default_factory=dict)

    def write(self, fragments: Iterable[Iterable[Fragment]], peers: Peers) -> None:
        """Write the tensors and complete the checkpoint, or remove it. Collective.

        Args:
            fragments: of each model.
            peers: what the calling thread reaches the other processes through.

        Raises:
            CheckpointError: on every process; `target` is unchanged.
        """
        try:
            parts = zip(fragments, self.layouts, strict=True)
            total = (
                sum(size for layout in self.layouts for size in layout.sizes.values()) // collectives.num_processes()
            )
            with working(f"saving {self.target.name}", total, live=peers is SCRIPT) as work:
                own = all_or_none(lambda: write_fragments(self.draft, parts, work.advance), peers)
                written = peers.gather(own)
                all_or_none(lambda: self._complete(written) if peers.is_main else None, peers)
        except BaseException:
            self.discard(peers)
            raise

    def discard(self, peers: Peers) -> None:
        """Remove the incomplete checkpoint."""
        if peers.is_main:
            discard_draft(self.draft)

    def _complete(self, written: Sequence[str | None]) -> None:
        complete_draft(self.draft, self.about, self.layouts, written, self.trees)
        publish_draft(self.draft, self.target, replaces=self.replaces)


def open_checkpoint(
    target: Path,
    sessions: Sequence[Session],
    collect: Callable[[Path], tuple[Mapping[str, Any], Mapping[str, Any]]],
    *,
    max_shard_bytes: int,
    run_hooks: Callable[[Path], Sequence[int]],
    claim_place: Callable[[], None],
    replaces: bool = True,
) -> OpenCheckpoint:
    """Begin a checkpoint: everything but the models' tensors is decided and collected. Collective.

    Args:
        target: the folder.
        sessions: of all prepared models, in their order.
        collect: called on the main process, after the hooks, with the folder that is being written, for further files;
            what the manifest says of the checkpoint, and by a file's path without ending the nested containers in it.
        max_shard_bytes: of a weight file.
        run_hooks: called on every process with the folder that is being written; which sessions' weights it has stored
            by itself.
        claim_place: called on the main process before anything is written.
        replaces: whether a checkpoint that has the name of `target` in the end is replaced.

    Raises:
        CheckpointError: on every process; nothing of it is left.
    """

    def plan(index: int, stored_by_hooks: Sequence[int] = ()) -> Layout:
        found = describe(described_fragments(sessions[index]))
        return plan_layout(
            [one for one in found if one.kind != WEIGHT or index not in stored_by_hooks],
            max_shard_bytes=max_shard_bytes,
            tied=shared_names(sessions[index].module),
            folder=f"model_{index}/" if index else "",
            model_class=type(sessions[index].module).__name__,
        )

    layouts = all_or_none(lambda: [plan(index) for index in range(len(sessions))])
    agree_on(layouts)
    tensor_bytes = sum(size for layout in layouts for size in layout.sizes.values())

    def open_own() -> str:
        claim_place()
        return str(open_draft(target, tensor_bytes + _SMALL_BYTES))

    draft = Path(on_main(open_own))
    opened = OpenCheckpoint(target, draft, layouts, replaces)

    def begin() -> None:
        create_files(draft, opened.layouts)
        opened.about, trees = collect(draft)
        opened.trees = {stem: encode_nested(tree, what=stem) for stem, tree in trees.items()}

    try:
        refuse_separate_folders(draft)
        if stored_by_hooks := run_hooks(draft):
            opened.layouts = all_or_none(lambda: [plan(index, stored_by_hooks) for index in range(len(sessions))])
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
    digests = collectives.gather_values(hashlib.sha256(headers).hexdigest())
    differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if differing:
        raise CheckpointError(
            f"processes {differing} have other tensors than process 0 (names, shapes, types or optimizer states), so "
            "that no common checkpoint can be written. Every process has to build the same model."
        )


def complete_draft(
    draft: Path,
    about: Mapping[str, Any],
    layouts: Sequence[Layout],
    written: Sequence[str | None],
    trees: Mapping[str, EncodedTree],
) -> None:
    """Write what is small, and the manifest last, into a draft that has the models' tensors.

    Args:
        draft: the folder.
        about: for the manifest.
        layouts: of each model.
        written: what `write_fragments` returned on each process.
        trees: file's path without ending → what goes into it.

    Raises:
        CheckpointError: the tensors are not complete.
    """
    pieces = {file: torch.from_numpy(own.encode()) for file, own in complete_pieces(layouts, written).items()}
    trees = {**trees, CHECKSUMS: encode_nested(pieces, what=CHECKSUMS)}
    sizes = {file: size for layout in layouts for file, size in layout.sizes.items()}
    for stem, tree in trees.items():
        tree.write(draft / stem)
    files: dict[str, tuple[int, int | None]] = {}
    for path in sorted(path for path in draft.rglob("*") if path.is_file()):
        name, size = str(path.relative_to(draft)), path.stat().st_size
        if size != sizes.get(name, size):
            raise CheckpointError(f"{path} has {size:,} bytes instead of {sizes[name]:,}.")
        files[name] = size, None if name in sizes else checksum_of_file(path)
    Manifest(about, layouts, files).write(draft)


def write_configuration(module: Any, folder: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write the configuration files of a transformers model; nothing for any other module.

    Args:
        module: the user's own.
        folder: where its weights are.
        dtype: that they are stored in; None for the model's own.
    """
    if as_pretrained(module) is None:
        return
    config = copy.deepcopy(module.config)
    config.architectures = [type(module).__name__]
    config.dtype = str(dtype or module.dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if module.can_generate():
        module.generation_config.save_pretrained(folder)


def refuse_separate_folders(draft: Path) -> None:
    """Refuse a folder in which marks are missing, see `missing_marks`. Collective.

    Raises:
        CheckpointError: on every process; which processes' marks are missing.
    """
    missing, why = missing_marks(draft)
    if missing:
        raise CheckpointError(
            f"{draft.parent} is not the same folder on all processes: process 0 does not read there what processes "
            f"{missing} have written{why}.\nSave to a file system that all machines share and that takes writes at "
            "any place of a file, such as NFS, Lustre or GPFS; a mounted object store does not."
        )


def missing_marks(draft: Path) -> tuple[list[int], str]:
    """Have every process write a mark into one file, and the main process read them all. Collective.

    It is done when the folder that `draft` is in is used for the first time. A file system that every machine has for
    itself is found, one that is not mounted everywhere, and one that keeps the file of the process that closed it last,
    as mounted object stores do.

    Returns:
        The processes whose marks are missing, and why as far as one knows.
    """
    if collectives.num_processes() == 1 or draft.parent in _found_shared:
        return [], ""
    file = draft / _PROBE
    world_size = collectives.num_processes()
    on_main(lambda: file.write_bytes(bytes(_MARK_BYTES * world_size)))
    error = _leave_mark(file)
    errors = [entry for entry in collectives.gather_values(error) if entry is not None]
    content = bytes.fromhex(on_main(lambda: file.read_bytes().hex()))
    missing = [rank for rank in range(world_size) if content[rank * _MARK_BYTES :][:_MARK_BYTES] != _mark(rank)]
    on_main(file.unlink)
    if not missing:
        _found_shared.add(draft.parent)
    return missing, f" ({errors[0]})" if errors else ""


def _leave_mark(file: Path) -> str | None:
    """Write this process' mark; what hinders it."""
    rank = collectives.process_index()
    try:
        descriptor = os.open(file, os.O_WRONLY)
        try:
            os.pwrite(descriptor, _mark(rank), rank * _MARK_BYTES)
        finally:
            os.close(descriptor)
    except OSError as error:
        return f"process {rank}: {error}"
    return None


def _mark(rank: int) -> bytes:
    return (rank + 1).to_bytes(_MARK_BYTES, "little")
