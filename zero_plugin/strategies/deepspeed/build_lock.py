"""Finds the lock of a killed C++ build, on which every later run would wait without a word."""

from __future__ import annotations

import os
from pathlib import Path

from zero_plugin.errors import MachineError

__all__ = ["refuse_stale_build_locks"]


def refuse_stale_build_locks() -> None:
    """Raise if a folder of torch's extension cache is locked and no process holds the lock.

    torch's builder creates `lock` in the folder of the op and keeps it open while it compiles; a builder that was
    killed leaves the file behind.

    Raises:
        MachineError: naming the lock and the command that removes it.
    """
    stale = [lock for lock in _locks() if not _is_open_somewhere(lock)]
    if stale:
        # A running builder may have finished between the two looks.
        stale = [lock for lock in stale if lock.exists()]
    if stale:
        names = "\n".join(f"  {lock}" for lock in stale)
        raise MachineError(
            "A C++ op build was killed and left its lock behind; this run would wait for it forever:\n"
            f"{names}\nIf no other machine is building into this folder, remove it:\n"
            + "\n".join(f"  rm -r {lock.parent}" for lock in stale)
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
