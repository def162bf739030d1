"""Writes a checkpoint: every process writes its ranges, then the main process adds the small files and publishes it."""

from __future__ import annotations

import copy
import hashlib
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from zero_plugin.checkpoint.manifest import Manifest, checksum_of_file
from zero_plugin.checkpoint.objects import EncodedTree, encode_nested
from zero_plugin.checkpoint.publish import discard_draft, open_draft, publish_draft, rotate_checkpoints
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
from zero_plugin.config.run_files import write_record
from zero_plugin.distributed import collectives
from zero_plugin.distributed.collectives import SCRIPT, Peers, all_or_none, on_main
from zero_plugin.distributed.messages import working
from zero_plugin.errors import CheckpointError
from zero_plugin.strategies.base import Session
from zero_plugin.tensors.modules import WEIGHT, Fragment, as_pretrained, shared_names

_log = logging.getLogger(__name__)

_SMALL_BYTES: Final = 2**24  # disk space for everything except a model's tensors
_PROBE: Final = ".probe"
_MARK_BYTES: Final = 8  # marks share a page, like the ends of neighbouring ranges in a tensor file
_found_shared: set[Path] = set()  # folders that passed: file systems do not change while a process runs


@dataclass(frozen=True, slots=True)
class Contents:
    """The content of a checkpoint in addition to its models' tensors.

    Attributes:
        about: facts for the manifest.
        trees: the nested containers of each further file, by the file's path without suffix.
        records: the run's record for each model, see `write_record`.
    """

    about: Mapping[str, Any]
    trees: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]


@dataclass(slots=True)
class OpenCheckpoint:
    """A checkpoint that is not published yet. It can be completed without the sessions.

    Attributes:
        target: the folder of the complete checkpoint.
        draft: the folder in which it is written, see `open_draft`.
        layouts: for each model, the files and positions of its tensors.
        replaces: whether a checkpoint that is in `target` when this one is complete is replaced.
        keep: how many checkpoints of the run `rotate` leaves; None for all.
        about: facts for the manifest; on the main process only.
        trees: the content of each other file by its path without suffix; on the main process only.
    """

    target: Path
    draft: Path
    layouts: Sequence[Layout]
    replaces: bool = True
    keep: int | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    trees: Mapping[str, EncodedTree] = field(default_factory=dict)

    def add(self, contents: Contents, sessions: Sequence[Session]) -> None:
        """Create the tensor files, add the contents, and write the configuration of each model. On the main process."""
        create_files(self.draft, self.layouts)
        for layout, session, record in zip(self.layouts, sessions, contents.records, strict=True):
            write_record(record, self.draft / layout.folder)
            write_configuration(session.module, self.draft / layout.folder)
        self.about = contents.about
        self.trees = {stem: encode_nested(tree, what=stem) for stem, tree in contents.trees.items()}

    def write(self, fragments: Iterable[Iterable[Fragment]], peers: Peers) -> None:
        """Write the tensors, complete the checkpoint and publish it, or remove it. Collective.

        Args:
            fragments: the fragments of each model.
            peers: the calling thread's connection to the other processes.

        Raises:
            CheckpointError: on every process, if one process fails; `target` is unchanged.
        """
        parts = zip(fragments, self.layouts, strict=True)
        total = _tensor_bytes(self.layouts) // collectives.num_processes()
        with (
            self.removed_on_failure(peers),
            working(f"saving {self.target.name}", total, live=peers is SCRIPT) as work,
        ):
            own = all_or_none(lambda: write_fragments(self.draft, parts, work.advance), peers)
            written = peers.gather(own)
            all_or_none(lambda: self._publish(written) if peers.is_main else None, peers)

    def rotate(self, peers: Peers) -> None:
        """Remove the oldest checkpoints of the run beyond `keep`, now that this one is published. Collective."""

        def remove() -> None:
            if self.keep is not None and peers.is_main:
                for removed in rotate_checkpoints(self.target, self.keep):
                    _log.info(f"{removed} was removed (total_limit={self.keep})")

        all_or_none(remove, peers)

    @contextmanager
    def removed_on_failure(self, peers: Peers) -> Iterator[None]:
        """Remove the draft if the code inside the context fails."""
        try:
            yield
        except BaseException:
            self.discard(peers)
            raise

    def discard(self, peers: Peers) -> None:
        """Remove the draft, if it is not published."""
        if peers.is_main:
            discard_draft(self.draft)

    def _publish(self, written: Sequence[str | None]) -> None:
        complete_draft(self.draft, self.about, self.layouts, written, self.trees)
        publish_draft(self.draft, self.target, replaces=self.replaces)


def plan_layouts(
    sessions: Sequence[Session], max_shard_bytes: int, *, stored_by_hooks: Collection[int] = ()
) -> list[Layout]:
    """Plan the tensor files of each model. Collective.

    Args:
        sessions: the sessions of all prepared models, in their order.
        max_shard_bytes: the largest size of a weight file.
        stored_by_hooks: indices of models whose weights the script's hooks have stored. These weights get no place.

    Raises:
        CheckpointError: on every process: safetensors files cannot hold a tensor of some process.
    """

    def plan(index: int, session: Session) -> Layout:
        found = describe(described_fragments(session))
        return plan_layout(
            [one for one in found if one.kind != WEIGHT or index not in stored_by_hooks],
            max_shard_bytes=max_shard_bytes,
            tied=shared_names(session.module),
            folder=f"model_{index}/" if index else "",
            model_class=type(session.module).__name__,
        )

    return all_or_none(lambda: [plan(index, session) for index, session in enumerate(sessions)])


def open_folder(target: Path, layouts: Iterable[Layout]) -> Path:
    """Return a new folder to write a checkpoint into, see `open_draft`. On the main process."""
    return open_draft(target, _tensor_bytes(layouts) + _SMALL_BYTES)


def _tensor_bytes(layouts: Iterable[Layout]) -> int:
    return sum(sum(layout.sizes.values()) for layout in layouts)


def agree_on(layouts: Sequence[Layout]) -> None:
    """Check that all processes have the same tensors, since each computes its file offsets locally. Collective.

    Raises:
        CheckpointError: the processes have different tensors.
    """
    headers = b"".join(header for layout in layouts for _, header in sorted(layout.headers.items()))
    digests = collectives.gather_values(hashlib.sha256(headers).hexdigest())
    differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if differing:
        raise CheckpointError(
            f"processes {differing} have other tensors than process 0 (names, shapes, types or optimizer states). No "
            "common checkpoint can be written. Every process has to build the same model."
        )


def complete_draft(
    draft: Path,
    about: Mapping[str, Any],
    layouts: Sequence[Layout],
    written: Sequence[str | None],
    trees: Mapping[str, EncodedTree],
) -> None:
    """Write the small files, and the manifest last, into a draft that has the models' tensors.

    Args:
        draft: the folder.
        about: facts for the manifest.
        layouts: the layout of each model.
        written: the text of `write_fragments` of each process.
        trees: file's path without suffix → its content.

    Raises:
        CheckpointError: the tensors are not complete.
    """
    pieces = {file: torch.from_numpy(own.encode()) for file, own in complete_pieces(layouts, written).items()}
    trees = {**trees, CHECKSUMS: encode_nested(pieces, what=CHECKSUMS)}
    sizes = {file: size for layout in layouts for file, size in layout.sizes.items()}
    for stem, tree in trees.items():
        tree.write(draft / stem)
    files: dict[str, tuple[int, int | None]] = {}
    for path in sorted([path for path in draft.rglob("*") if path.is_file()]):
        name, size = str(path.relative_to(draft)), path.stat().st_size
        if size != sizes.get(name, size):
            raise CheckpointError(f"{path} has {size:,} bytes instead of {sizes[name]:,}.")
        files[name] = size, None if name in sizes else checksum_of_file(path)
    Manifest(about, layouts, files).write(draft)


def write_configuration(module: Any, folder: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write the configuration files of a transformers model. Do nothing for other modules.

    Args:
        module: the user's own module.
        folder: the folder of its weights.
        dtype: the dtype of the stored weights; None for the model's own.
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
        CheckpointError: on every process: marks are missing. The message names their processes.
    """
    missing, why = missing_marks(draft)
    if missing:
        raise CheckpointError(
            f"{draft.parent} is not the same folder on all processes: process 0 cannot read what processes {missing} "
            f"have written{why}.\nSave to a file system that all machines share and that supports writes at any "
            "position of a file, such as NFS, Lustre or GPFS. A mounted object store does not."
        )


def missing_marks(draft: Path) -> tuple[list[int], str]:
    """Have every process write a mark into one file, and the main process read all marks. Collective.

    This runs only when the draft's parent folder is used for the first time. It detects file systems that are local to
    each machine or not mounted everywhere. It also detects file systems that keep only the file of the process that
    closed it last, such as mounted object stores.

    Returns:
        The processes whose marks are missing, and the reason if known.
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
    """Write this process's mark. Return the error message, or None."""
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
