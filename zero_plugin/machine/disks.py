"""A folder for NVMe offload: its file system, its room, whether it takes O_DIRECT, and how fast it is."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zero_plugin.machine.control_groups import read_mounts

_BLOCK: Final = 8 << 20
_SECONDS: Final = 0.4  # each of writing and reading
_MOST: Final = 512 << 20


@dataclass(frozen=True, slots=True)
class Disk:
    """What was measured of a folder; speeds in bytes per second, None where O_DIRECT is refused."""

    filesystem: str
    free: int
    direct: bool
    write: float | None = None
    read: float | None = None


def look_at_disk(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> Disk | None:
    """Measure for about a second, with one file that is removed; None where no file can be made.

    A folder that is not there yet is measured by the nearest one above it, and is not made.
    """
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
    try:
        descriptor, name = tempfile.mkstemp(prefix=".zero_plugin_doctor_", dir=there)
    except OSError:
        return None
    os.close(descriptor)
    try:
        free = shutil.disk_usage(there).free
        speeds = _measure(name, min(_MOST, free // 4 // _BLOCK * _BLOCK))
    finally:
        Path(name).unlink(missing_ok=True)
    kind = filesystem_of(there, mounts)
    return Disk(kind, free, False) if speeds is None else Disk(kind, free, True, *speeds)


def filesystem_of(folder: Path, mounts: Path) -> str:
    """The kind of file system that a folder lies on, as the kernel's `mountinfo` has it."""
    wanted, kind, longest = str(folder.resolve()), "unknown", -1
    for mount in read_mounts(mounts):
        inside = wanted == mount.folder or wanted.startswith(mount.folder.rstrip("/") + "/")
        if inside and len(mount.folder) >= longest:  # of two on one folder, the later covers the other
            kind, longest = mount.kind, len(mount.folder)
    return kind


def _measure(file: str, most: int) -> tuple[float, float] | None:
    """Bytes per second of writing and of reading past the page cache; None where O_DIRECT is refused."""
    if not hasattr(os, "O_DIRECT") or most < _BLOCK:
        return None
    block = mmap.mmap(-1, _BLOCK)  # O_DIRECT wants memory at a page's border
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_DIRECT)
    except OSError:
        return None
    try:
        block[:8] = b"doctor.."
        done, began = 0, time.perf_counter()
        while done < most and time.perf_counter() - began < _SECONDS:
            done += os.pwrite(descriptor, block, done)
        os.fdatasync(descriptor)
        written = done / max(time.perf_counter() - began, 1e-9)
        size, done, began = done, 0, time.perf_counter()
        while done < size and time.perf_counter() - began < _SECONDS:
            done += os.preadv(descriptor, [block], done)
        return written, done / max(time.perf_counter() - began, 1e-9)
    except OSError:
        return None
    finally:
        os.close(descriptor)
