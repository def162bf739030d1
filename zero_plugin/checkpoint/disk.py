"""Files and folders that the disk has when a call returns, and what the C library adds to Python's calls for them."""

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
    """Wait until the disk has a file's content, also if another process wrote it, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make a folder, if it is missing, and those above it; wait until the disk has their names."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        sync(path.parent)


def reserve(file: BinaryIO, size: int) -> None:
    """Make a file that is opened for writing `size` bytes long, and reserve the disk space where the file system can.

    `os.posix_fallocate` is no substitute: where the file system cannot, it writes a byte into every block.

    Raises:
        OSError: there is no space.
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
    """Have the disk begin with a part of a file that was written just now, so that a later fsync finds less to do."""
    sync_file_range = getattr(_LIBC, "sync_file_range", None)  # Linux; sync_file_range(2)
    if sync_file_range is not None:
        sync_file_range(descriptor, ctypes.c_int64(start), ctypes.c_int64(size), _SYNC_FILE_RANGE_WRITE)


def exchange(one: Path, other: Path) -> bool:
    """Swap the names of two folders in one step; False where the system or the file system cannot (NFS, macOS).

    Raises:
        OSError: it can, and refuses these two.
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
