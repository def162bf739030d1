"""Finds the lock of a killed C++ build, on which every later run would wait without a word."""

from __future__ import annotations

import os
from pathlib import Path

from zero_plugin.errors import MachineError

__all__ = ["find_stale_build_locks", "refuse_stale_build_locks"]


def find_stale_build_locks() -> list[Path]:
    """Locks in torch's extension cache that no process of this machine holds.

    torch's builder creates `lock` in the folder of the op and keeps it open while it compiles, and also while it only
    looks whether there is something to compile; a process that is killed then leaves the file behind.
    """
    stale = [lock for lock in _locks() if not _is_open_somewhere(lock)]
    return [lock for lock in stale if lock.exists()]  # a builder may have finished between the two looks


def refuse_stale_build_locks() -> None:
    """Raise if there is a stale lock.

    Raises:
        MachineError: naming the lock and the command that removes it.
    """
    if stale := find_stale_build_locks():
        raise MachineError(
            "A C++ op build was killed and left its lock behind; this run would wait for it forever.\n"
            "If no other machine is building into this folder, remove it:\n"
            + "\n".join(f"  rm {lock}" for lock in stale)
        )


def _locks() -> list[Path]:
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(root) if root else Path(caches, "torch_extensions")
    return sorted({*cache.glob("*/lock"), *cache.glob("*/*/lock")})


def _is_open_somewhere(file: Path) -> bool:
    """Whether a process of this machine has `file` open; True where that cannot be seen."""
    proc = Path("/proc")
    if not proc.is_dir():
        return True
    return any(_links_to(descriptor, file.resolve()) for descriptor in proc.glob("[0-9]*/fd/*"))


def _links_to(descriptor: Path, file: Path) -> bool:
    try:
        return descriptor.readlink() == file
    except OSError:  # the process ended meanwhile, or belongs to another user
        return False
