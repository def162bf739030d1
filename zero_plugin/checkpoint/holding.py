"""Says to other jobs that a folder is being written, for as long as this process lives."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = ["hold", "is_held", "let_go"]

_descriptors: Final[dict[Path, int]] = {}


def hold(folder: Path) -> None:
    """Have `is_held` say so everywhere, also when the folder gets another name, until `let_go` or this process ends.

    Nothing happens where the file system cannot lock a folder (NFS).
    """
    descriptor = _descriptors[folder] = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def let_go(folder: Path) -> None:
    """End `hold`, if it holds.

    Args:
        folder: as it was called there.
    """
    if (descriptor := _descriptors.pop(folder, None)) is not None:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # else processes forked meanwhile would hold it further
        os.close(descriptor)


def is_held(folder: Path) -> bool:
    """Whether a process that lives holds it. False where nobody can know."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
