"""CPU memory, what of it may be locked or shared, and the folders of NVMe offload."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from zero_plugin.cli.doctor_checks.finding import Finding, Needs
from zero_plugin.config.amounts import show_bytes
from zero_plugin.machine.hardware import Disk

_SHARED = "/dev/shm"  # noqa: S108 - the check's name
_SMALL_LOCKED = 1 << 30  # bytes: a swapped gradient or weight of a model that needs NVMe
_SMALL_SHARED = 1 << 30  # bytes; docker gives 64 MiB unless told otherwise
_UNLIMITED = (
    "ulimit -l unlimited   (as root: two lines `* soft memlock unlimited`, `* hard memlock unlimited` in "
    "/etc/security/limits.conf; docker run --ulimit memlock=-1)"
)
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
        found = f"{show_bytes(limit)} per process, and the swap buffers of offload_param lock {show_bytes(each)}"
        return Finding("locked memory", "wrong", found, _UNLIMITED)  # DeepSpeed gets no buffer at all
    if needs.nvme_folders:
        found = (
            f"{show_bytes(limit)} per process; NVMe offload locks its buffers, as much as the model's largest weights"
        )
        scarce = limit < _SMALL_LOCKED
        return Finding("locked memory", "warning" if scarce else "ok", found, _UNLIMITED if scarce else "")
    return Finding("locked memory", "ok", f"{show_bytes(limit)} per process; only NVMe offload locks more")


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
    found = f"{show_bytes(free)} of {show_bytes(size)} free"
    if free < _SMALL_SHARED:
        found += "; a worker of a DataLoader that finds it full dies of SIGBUS"
        return Finding(_SHARED, "warning", found, fix if size < _SMALL_SHARED else "ls -lS /dev/shm, and remove.")
    return Finding(_SHARED, "ok", found)


def check_host_memory(total: int, available: int, needs: Needs) -> Finding:
    """What is left for weights and optimizer states in host memory.

    Args:
        total: bytes that the run may have.
        available: bytes that could be taken now.
        needs: of the run.
    """
    processes = f"{needs.processes} process{'es' * (needs.processes > 1)}"
    found = f"{show_bytes(available)} of {show_bytes(total)} free, for {processes}"
    if needs.offloads_to_host and available < _LITTLE_LEFT * needs.processes:
        found += "; offload to the CPU keeps 12 bytes there for each parameter with Adam"
        return Finding("host memory", "warning", found, "Stop what else runs, or offload to nvme in place of cpu.")
    return Finding("host memory", "ok", found)


_NETWORK: Final = ("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "gpfs", "beegfs", "fuse.sshfs", "9p", "afs")
_SLOW: Final = 0.5e9  # bytes per second: a step would wait for the disk most of the time
_LITTLE: Final = 20e9  # bytes


def check_disk(folder: str, disk: Disk | None) -> Iterator[Finding]:
    """Findings on one folder.

    Args:
        folder: as the configuration names it.
        disk: what was measured; None where no file can be made there.
    """
    name = f"NVMe {folder}"
    elsewhere = "Write a folder on a local NVMe disk (xfs, ext4) for nvme_path; `lsblk -o NAME,ROTA,MOUNTPOINT` lists."
    if disk is None:
        yield Finding(name, "wrong", "no file can be made there", f"mkdir -p {folder} && chmod u+rwx {folder}")
        return
    if disk.filesystem in ("tmpfs", "ramfs"):
        yield Finding(
            name, "wrong", f"{disk.filesystem}: a RAM disk, which takes the memory that it is to save", elsewhere
        )
    elif disk.filesystem in _NETWORK:
        yield Finding(
            name, "warning", f"{disk.filesystem}: over the network, for every weight at every step", elsewhere
        )
    elif not disk.direct:
        yield Finding(
            name, "wrong", f"{disk.filesystem} refuses O_DIRECT, by which DeepSpeed reads and writes", elsewhere
        )
    else:
        yield Finding(name, "ok", f"{disk.filesystem}, takes O_DIRECT")
    found = f"{show_bytes(disk.free)} free"
    if disk.free < _LITTLE:
        fix = "Make room: 12 bytes for each parameter with Adam, 2 more for weights in 16 bits."
        yield Finding(f"{name} room", "warning", found, fix)
    else:
        yield Finding(f"{name} room", "ok", found)
    if disk.write is not None and disk.read is not None:
        found = f"writes {disk.write / 1e9:.2g} GB/s, reads {disk.read / 1e9:.2g} GB/s"
        slow = min(disk.write, disk.read) < _SLOW
        yield Finding(f"{name} speed", "warning" if slow else "ok", found, elsewhere if slow else "")
