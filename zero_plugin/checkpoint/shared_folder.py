"""Finds out whether all processes have one and the same folder before them."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Final

from zero_plugin.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from zero_plugin.distributed import collectives
from zero_plugin.distributed.collectives import all_or_none, on_main
from zero_plugin.errors import CheckpointError

_NAME: Final = ".probe"
_MARK_BYTES: Final = 8  # side by side in one page, as the ends of ranges are
_found_shared: set[Path] = set()  # file systems do not change while a process runs


def refuse_separate_folders(draft: Path) -> None:
    """Refuse a folder that is not `is_one_folder`. Collective.

    Raises:
        CheckpointError: on every process; which processes' marks are missing.
    """
    missing, why = _missing_marks(draft)
    if missing:
        raise CheckpointError(
            f"{draft.parent} is not one folder for all processes: what processes {missing} write into a file there is "
            f"not what process 0 reads{why}.\nSave to a file system that all machines share and that takes writes at "
            "any place of a file, such as NFS, Lustre or GPFS; a mounted object store does not."
        )


def is_one_folder(draft: Path) -> bool:
    """Have every process write a mark into one file, and the main process read them all. Collective.

    It is done when the folder that `draft` is in is used for the first time. A file system that every machine has for
    itself is found, one that is not mounted everywhere, and one that keeps the file of the process that closed it last,
    as mounted object stores do.
    """
    return not _missing_marks(draft)[0]


def _missing_marks(draft: Path) -> tuple[list[int], str]:
    """The processes whose marks are missing, and why as far as one knows."""
    if collectives.num_processes() == 1 or draft.parent in _found_shared:
        return [], ""
    file = draft / _NAME
    world_size = collectives.num_processes()
    on_main(lambda: file.write_bytes(bytes(_MARK_BYTES * world_size)))
    error = _leave_mark(file)
    errors = [entry for entry in collectives.gather_object([error]) if entry is not None]
    content = on_main(file.read_bytes)
    missing = [rank for rank in range(world_size) if content[rank * _MARK_BYTES :][:_MARK_BYTES] != _mark(rank)]
    on_main(file.unlink)
    if not missing:
        _found_shared.add(draft.parent)
    return missing, f" ({errors[0]})" if errors else ""


def read_common_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint that the main process has found. Collective.

    Raises:
        CheckpointError: on every process; which processes have none, or another one, in their folder of that name.
    """
    sums = collectives.gather_object([_manifest_sum(folder)])
    for what, ranks in (
        ("no checkpoint", [rank for rank, checksum in enumerate(sums) if checksum is None]),
        ("another checkpoint", [rank for rank, checksum in enumerate(sums) if checksum not in (None, sums[0])]),
    ):
        if ranks and sums[0] is not None:
            raise CheckpointError(
                f"processes {ranks} see {what} in {folder}, where process 0 has found one: all processes have to read "
                "the same.\nPut it on a file system that all machines share, or a copy on each."
            )
    return all_or_none(lambda: read_manifest(folder))


def _manifest_sum(folder: Path) -> int | None:
    try:
        return zlib.crc32((folder / MANIFEST_NAME).read_bytes())
    except OSError:
        return None


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
