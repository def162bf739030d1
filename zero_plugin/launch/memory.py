"""Host memory while the workers run: what was free, what each of them had, and whether the kernel killed for it."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Final

__all__ = ["MemoryWatch", "available_bytes", "count_memory_kills", "largest_processes"]

_LOOK_S: Final = 1.0
_PROC: Final = Path("/proc")
_CGROUP: Final = Path("/sys/fs/cgroup")


class MemoryWatch:
    """Looks every second, while it is entered.

    Attributes:
        available: bytes that could be had at the last look; None where the system does not tell.
        resident: bytes in memory of each child of this process at the last look that found it, by process id.
    """

    def __init__(self) -> None:
        self.available: int | None = None
        self.resident: dict[int, int] = {}
        self._kills_before = count_memory_kills()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="zero_plugin memory", daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()

    @property
    def kills(self) -> int | None:
        """Processes that the kernel has killed since for want of memory, in this container where it has a limit of
        its own; None where the system does not tell."""
        now = count_memory_kills()
        return None if now is None or self._kills_before is None else now - self._kills_before

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_S):
            self.available = available_bytes()
            self.resident.update({pid: size for pid in _children() if (size := _resident_bytes(pid))})


def available_bytes() -> int | None:
    """Host memory that processes could still get without swapping; None where the system does not tell.

    The kernel's estimate (`MemAvailable`), or what is left of the container's limit if that is less.
    """
    sizes = [1024 * kilobytes for kilobytes in _numbers(_PROC / "meminfo", "MemAvailable:")]
    for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        for folder in _own_groups():
            whole, taken = _text(folder / limit), _text(folder / used)
            if whole.isdigit() and taken.isdigit():
                cached = next(iter(_numbers(folder / "memory.stat", "inactive_file")), 0)  # given back when asked for
                sizes.append(int(whole) - int(taken) + cached)
    return max(0, min(sizes)) if sizes else None


def count_memory_kills() -> int | None:
    """Processes that the kernel has ever killed here for want of memory; None where it does not tell."""
    for folder in _own_groups():
        for name in ("memory.events", "memory.oom_control"):
            for number in _numbers(folder / name, "oom_kill"):
                return number
    return next(iter(_numbers(_PROC / "vmstat", "oom_kill")), None)  # of the whole machine


def largest_processes(count: int) -> list[tuple[int, int, str]]:
    """Bytes in memory, id and name of the largest processes that can be seen here, without this one; largest first."""
    numbers = [int(entry.name) for entry in _PROC.glob("[0-9]*")]
    sizes = sorted(((_resident_bytes(pid), pid) for pid in numbers if pid != os.getpid()), reverse=True)
    return [(size, pid, _text(_PROC / str(pid) / "comm")) for size, pid in sizes[:count]]


def _own_groups() -> list[Path]:
    """Folders of this process' memory cgroup, of either version; in a container its root is mounted in their place."""
    found = []
    for line in _text(_PROC / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root = _CGROUP / controllers
            found += [root / path.lstrip("/"), root]
    return [folder for folder in found if (folder / "memory.stat").exists()][:1]


def _children() -> list[int]:
    """Processes that any thread of this one has started."""
    return [int(pid) for task in _PROC.glob("self/task/*/children") for pid in _text(task).split()]


def _resident_bytes(pid: int) -> int:
    pages = _text(_PROC / str(pid) / "statm").split()[1:2]
    return int(pages[0]) * os.sysconf("SC_PAGE_SIZE") if pages else 0


def _numbers(file: Path, name: str) -> list[int]:
    """What follows `name` in a file of lines `name number …`."""
    words = (line.split() for line in _text(file).splitlines())
    return [int(line[1]) for line in words if len(line) > 1 and line[0] == name]


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
