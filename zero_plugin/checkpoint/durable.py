"""Files and folders that the disk has when the call returns."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["sync_folder", "write_text"]


def write_text(path: Path, text: str) -> None:
    """Write a file and wait until the disk has it."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names in `folder`."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
