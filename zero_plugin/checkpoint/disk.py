"""Durable files and folders: they are on the disk when a call returns. Uses C library calls that Python lacks."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import BinaryIO, Final

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
_SYNC_FILE_RANGE_WRITE: Final = 2
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk. Other processes' writes are included."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents. Wait until their names are on the disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        sync(path.parent)


def reserve(file: BinaryIO, size: int) -> None:
    """Set the length of an open file to `size` bytes, and reserve the disk space if the file system supports it.

    `os.posix_fallocate` is no substitute: without that support, it writes a byte into every block.

    Raises:
        OSError: the disk has too little space.
    """
    file.truncate(size)
    fallocate = getattr(_LIBC, "fallocate", None)  # Linux; fallocate(2)
    if fallocate is None or size == 0:
        return
    if fallocate(file.fileno(), 0, ctypes.c_int64(0), ctypes.c_int64(size)) != 0:
        error = ctypes.get_errno()
        if error in _NO_ROOM:
            raise OSError(error, os.strerror(error))


def start_writing(descriptor: int, start: int, size: int) -> None:
    """Start writing a new part of a file to the disk without waiting. A later fsync is then faster."""
    sync_file_range = getattr(_LIBC, "sync_file_range", None)  # Linux; sync_file_range(2)
    if sync_file_range is not None:
        sync_file_range(descriptor, ctypes.c_int64(start), ctypes.c_int64(size), _SYNC_FILE_RANGE_WRITE)


def exchange(one: Path, other: Path) -> bool:
    """Swap the names of two folders in one step. Return False without system or file system support (NFS, macOS).

    Raises:
        OSError: the system supports it, but refuses these two folders.
    """
    renameat2 = getattr(_LIBC, "renameat2", None)  # Linux; rename(2)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    error = ctypes.get_errno()
    if error in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(error, os.strerror(error), str(one), None, str(other))
