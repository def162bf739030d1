"""Files that are written whole or not at all, and the folder of a user's that may be lost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path


def replace_text(file: Path, text: str) -> None:
    """Write a text file so that whoever reads it, also after a crash, finds the old text or the new, whole.

    Raises:
        OSError: the file cannot be written, or its folder is missing.
    """
    target = Path(os.path.realpath(file))  # a link stays a link
    beside = target.with_name(f".{target.name}.{os.getpid()}")  # several processes may write the same
    try:
        beside.write_text(text, encoding="utf-8")
        if target.exists():
            shutil.copymode(target, beside)
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def cache_folder(environ: Mapping[str, str]) -> Path:
    """`$XDG_CACHE_HOME`, else `~/.cache`."""
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(cache))  # noqa: PTH111 - Path.expanduser raises for a user without a home
