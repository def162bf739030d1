"""Host memory, the part of it that may be locked, and what processes share of it."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Final

from zero_plugin.doctor.finding import Finding
from zero_plugin.doctor.needs import Needs

__all__ = ["check_host_memory", "check_locked_memory", "check_shared_memory", "lockable_bytes"]

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
