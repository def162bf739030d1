"""Checks whether a checkpoint is complete by its files' names and sizes. Their contents are verified while loading."""

from __future__ import annotations

import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from zero_plugin.checkpoint.manifest import Manifest, read_manifest
from zero_plugin.errors import CheckpointError

_MOST_LOOKS: Final = 20  # tries, if another job keeps replacing the checkpoint during the check


def find_damage(folder: Path) -> str | None:
    """Return why a checkpoint is incomplete, judged by names and sizes alone; None if it is complete."""
    damage = None
    for _ in range(_MOST_LOOKS):
        before = _which(folder)
        try:
            damage = damage_of(folder)
        except OSError as error:
            damage = f"{error.filename or folder} cannot be read ({error.strerror})."
        if damage is None or _which(folder) == before:
            break  # if the folder has changed, another job replaced the checkpoint after its manifest was read
    return damage


def _which(folder: Path) -> tuple[int, int] | None:
    """Return an identity that differs for a later folder of the same name; None without a folder."""
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns


def damage_of(folder: Path) -> str | None:
    """Return the damage like `find_damage`, but raise if a file cannot be read now.

    Raises:
        OSError: a file cannot be read now. This says nothing about damage.
    """
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        return str(error)
    for path in manifest.files:
        with suppress(FileNotFoundError, NotADirectoryError):
            (folder / path).stat()
    return next(iter(find_wrong_files(folder, manifest).values()), None)


def find_wrong_files(folder: Path, manifest: Manifest) -> dict[str, str]:
    """Find files that are missing or have the wrong size, each with a sentence. Their contents are not read."""
    found = {path: _wrong_size(folder / path, size) for path, (size, _) in manifest.files.items()}
    return {path: problem for path, problem in found.items() if problem is not None}


def _wrong_size(path: Path, size: int) -> str | None:
    try:
        status = path.stat()
        found = status.st_size
        if not stat.S_ISREG(status.st_mode):
            return f"{path} is not a regular file."
    except FileNotFoundError:
        return f"{path} is missing."
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})."
    return None if found == size else f"{path} has {found:,} bytes instead of {size:,}."
