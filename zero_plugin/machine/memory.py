"""CPU memory: what is free, what may be locked, and what the workers of a run take.

Host memory while the workers run: what was free, what each of them had, and whether the kernel killed for it.

Host memory, the part of it that may be locked, and what processes share of it.
"""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path
from types import TracebackType
from typing import Final

from zero_plugin.machine.finding import Finding, Needs

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


_SHARED = "/dev/shm"  # noqa: S108 - the check's name
_SMALL_LOCKED = 1 << 30  # bytes: a swapped gradient or weight of a model that needs NVMe
_SMALL_SHARED = 1 << 30  # bytes; docker gives 64 MiB unless told otherwise
_UNLIMITED = (
    "ulimit -l unlimited   (as root: two lines `* soft memlock unlimited`, `* hard memlock unlimited` in "
    "/etc/security/limits.conf; docker run --ulimit memlock=-1)"
)
_STATUS: Final = Path("/proc/self/status")
_CAP_IPC_LOCK: Final = 14  # linux/capability.h
_LITTLE_LEFT = 4 << 30  # bytes for a process that offloads to host memory


def check_locked_memory(limit: int | None, needs: Needs) -> Finding:
    """`ulimit -l` against what NVMe offload locks.

    Args:
        limit: bytes that a process may lock, None for no limit.
        needs: `locked_bytes` is of all processes; the limit is of each.
    """
    each = needs.locked_bytes // needs.processes
    if limit is None:
        return Finding("locked memory", "ok", "no limit")
    if each > limit:
        found = f"{_size(limit)} per process, and the swap buffers of offload_param lock {_size(each)}"
        return Finding("locked memory", "wrong", found, _UNLIMITED)  # DeepSpeed gets no buffer at all
    if needs.nvme_folders:
        found = f"{_size(limit)} per process; NVMe offload locks its buffers, as much as the model's largest weights"
        scarce = limit < _SMALL_LOCKED
        return Finding("locked memory", "warning" if scarce else "ok", found, _UNLIMITED if scarce else "")
    return Finding("locked memory", "ok", f"{_size(limit)} per process; only NVMe offload locks more")


def check_shared_memory(size: int | None, free: int, needs: Needs) -> Finding:
    """The file system by which loaders' workers, and NCCL, hand over batches and buffers.

    Args:
        size: bytes of the file system, None where there is none.
        free: bytes of it that are not used.
        needs: of the run.
    """
    fix = "mount -o remount,size=8G /dev/shm   (docker run --shm-size=8g, or --ipc=host)"
    if size is None:
        return Finding(_SHARED, "wrong" if needs.processes > 1 else "warning", "is not there", fix)
    found = f"{_size(free)} of {_size(size)} free"
    if free < _SMALL_SHARED:
        found += "; a worker of a DataLoader that finds it full dies of SIGBUS"
        return Finding(_SHARED, "warning", found, fix if size < _SMALL_SHARED else "ls -lS /dev/shm, and remove.")
    return Finding(_SHARED, "ok", found)


def check_host_memory(total: int | None, available: int | None, needs: Needs) -> Finding:
    """What is left for weights and optimizer states in host memory.

    Args:
        total: bytes of the machine or the container, None where not known.
        available: bytes that could be taken now.
        needs: of the run.
    """
    if total is None or available is None:
        return Finding("host memory", "ok", "not known on this system")
    found = f"{_size(available)} of {_size(total)} free, for {needs.processes} process{'es' * (needs.processes > 1)}"
    if needs.offloads_to_host and available < _LITTLE_LEFT * needs.processes:
        found += "; offload to the CPU keeps 12 bytes there for each parameter with Adam"
        return Finding("host memory", "warning", found, "Stop what else runs, or offload to nvme in place of cpu.")
    return Finding("host memory", "ok", found)


def lockable_bytes() -> int | None:
    """What a process may lock, as `ulimit -l` says; None without a limit, as for root, or CAP_IPC_LOCK."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    try:
        held = next(line for line in _STATUS.read_text().splitlines() if line.startswith("CapEff:"))
    except (OSError, StopIteration):  # not Linux
        held = "CapEff: 0"
    has_capability = int(held.split()[1], 16) >> _CAP_IPC_LOCK & 1
    return None if limit == resource.RLIM_INFINITY or has_capability else limit


def _size(count: int) -> str:
    return f"{count / 2**30:.3g} GiB" if count >= 2**29 else f"{count / 2**20:.3g} MiB"
