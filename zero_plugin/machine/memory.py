"""CPU memory: how much there is, what is free, what may be locked, and what the workers of a run take.

Everything in this package that asks for CPU memory asks here.
"""

from __future__ import annotations

import os
import resource
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final

import psutil

from zero_plugin.machine.control_groups import PROC, own_groups, read_numbers, read_text

_LOOK_S: Final = 1.0
_STATUS: Final = Path("/proc/self/status")
_CAP_IPC_LOCK: Final = 14  # linux/capability.h
# Files of a control group of version 2, then 1: a limit, and what is taken; how the counts in `memory.stat` begin that
# include the groups below it (in version 2 all do).
_LIMITS: Final = (
    ("memory.max", "memory.current", "", "file_"),
    ("memory.high", "memory.current", "", "file_"),  # above it processes hardly run
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_", "total_"),
)


def total_cpu_memory() -> int:
    """Bytes that this process and its workers may have at most: the machine's, or the least limit that holds here.

    Limits are those of the control groups (of a container, or a scheduler's job) from this process' own up to the root,
    and `ulimit -v`.
    """
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _limits())])


def available_cpu_memory() -> int:
    """Bytes that could be taken now without swapping: the kernel's estimate, or the least that a limit leaves.

    See `total_cpu_memory`. Of what a limit counts as taken, `_reclaimable` can be had.
    """
    return max(0, min([int(psutil.virtual_memory().available), *(limit - taken for limit, taken in _limits())]))


class MemoryWatch:
    """Looks every second, while it is entered.

    Attributes:
        available: bytes that could be had at the last look; None before the first.
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
            self.available = available_cpu_memory()
            self.resident.update({pid: size for pid in _children() if (size := _resident_bytes(pid))})


def count_memory_kills() -> int | None:
    """Processes that the kernel has ever killed here for want of memory; None where it does not tell."""
    files = [folder / name for folder in own_groups("memory") for name in ("memory.events", "memory.oom_control")]
    counts = (read_numbers(file).get("oom_kill") for file in (*files, PROC / "vmstat"))  # the last: the whole machine's
    return next((count for count in counts if count is not None), None)


def largest_processes(count: int) -> list[tuple[int, int, str]]:
    """Bytes in memory, id and name of the largest processes that can be seen here, without this one; largest first."""
    numbers = [int(entry.name) for entry in PROC.glob("[0-9]*")]
    sizes = sorted(((_resident_bytes(pid), pid) for pid in numbers if pid != os.getpid()), reverse=True)
    return [(size, pid, read_text(PROC / str(pid) / "comm")) for size, pid in sizes[:count]]


def _limits() -> Iterator[tuple[int, int]]:
    """Every limit of this process' memory, and how many bytes of it are taken; no limit may be a huge number."""
    for group in own_groups("memory"):
        for limit, taken, lists, writes in _LIMITS:
            size = read_text(group / limit)
            if size.isdigit():  # else "max", or no such file
                yield int(size), int(read_text(group / taken) or 0) - _reclaimable(group, lists, writes)
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if address_space != resource.RLIM_INFINITY:
        yield address_space, int(psutil.Process().memory_info().vms)


def _reclaimable(group: Path, lists: str, writes: str) -> int:
    """Bytes that a control group is charged for and that the kernel frees before a process is refused memory.

    These are the pages of files on its two lists for reclaim. It prefers the inactive list, but moves pages over from
    the active one as soon as it needs them, so that both can be had, as in the kernel's own `MemAvailable`. A page that
    was written and is not on the disk yet cannot be freed before it is, and such pages are on the same lists: they are
    taken off. What else a group counts as `file` is on other lists: pages of tmpfs and of shared memory have no file to
    be read from again, and are among the anonymous ones; what a process has locked is unevictable.
    """
    stat = Counter(read_numbers(group / "memory.stat"))
    on_lists = stat[f"{lists}inactive_file"] + stat[f"{lists}active_file"]
    return max(0, on_lists - stat[f"{writes}dirty"] - stat[f"{writes}writeback"])


def _children() -> list[int]:
    """Processes that any thread of this one has started."""
    return [int(pid) for task in PROC.glob("self/task/*/children") for pid in read_text(task).split()]


def _resident_bytes(pid: int) -> int:
    pages = read_text(PROC / str(pid) / "statm").split()[1:2]
    return int(pages[0]) * os.sysconf("SC_PAGE_SIZE") if pages else 0


def lockable_bytes() -> int | None:
    """What a process may lock, as `ulimit -l` says; None without a limit, as for root, or CAP_IPC_LOCK."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    lines = read_text(_STATUS).splitlines()  # none where this is not Linux
    held = next((line for line in lines if line.startswith("CapEff:")), "CapEff: 0")
    has_capability = int(held.split()[1], 16) >> _CAP_IPC_LOCK & 1
    return None if limit == resource.RLIM_INFINITY or has_capability else limit
