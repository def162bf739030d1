"""This machine's GPUs, cores, ports, memory and disks, as far as this process may use them.

This module is the package's only reader of these facts. It imports torch only for GPUs. Control groups limit a
container or a scheduler's job, so they are read first. Each process of a run is bound to the cores near its GPU's
memory, or to an even share.
"""

from __future__ import annotations

import gc
import mmap
import os
import resource
import shutil
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil

from zero_plugin.machine.xla_runtime import find_tpu

if TYPE_CHECKING:
    import torch

PROC: Final = Path("/proc")


@dataclass(frozen=True, slots=True)
class Mount:
    """A line of `mountinfo`: the mounted part of a file system, its folder, kind and options."""

    root: str
    folder: str
    kind: str
    options: tuple[str, ...]


def own_groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups, of either version: its own first, then its parents.

    The limits of all these groups apply to this process.

    Args:
        controller: the controller, e.g. `memory` or `cpu`. In version 1, each controller has its own groups.
    """
    own = {}
    for line in read_text(PROC / "self" / "cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), group))
    for mount in read_mounts(PROC / "self" / "mountinfo"):
        name = {"cgroup2": "", "cgroup": controller}.get(mount.kind)
        if name in own and (name == "" or name in mount.options):
            inside = Path(own[name])  # in a container, the process's own group may be mounted as the root
            folder = Path(mount.folder, inside.relative_to(mount.root) if inside.is_relative_to(mount.root) else "")
            yield from (group for group in (folder, *folder.parents) if group.is_relative_to(mount.folder))


def read_mounts(mountinfo: Path) -> Iterator[Mount]:
    """Yield the mounts of a `mountinfo` file in order. A later mount covers an earlier one on the same folder."""
    for line in read_text(mountinfo).splitlines():
        before, _, after = line.partition(" - ")
        root, folder = (word.encode().decode("unicode_escape") for word in before.split()[3:5])
        kind, *_, options = after.split()
        yield Mount(root, folder, kind, tuple(options.split(",")))


def read_numbers(file: Path) -> dict[str, int]:
    """Read a file of lines `name number`; empty if the file is missing."""
    words = (line.split() for line in read_text(file).splitlines())
    return {line[0]: int(line[1]) for line in words if len(line) == 2 and line[1].isdigit()}


def read_text(file: Path) -> str:
    """Read a text without surrounding blanks; "" if the file is missing or may not be read."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


def process_stat(pid: int) -> list[str]:
    """Return a process's state, parent id and more, as the kernel lists them; empty if the process is gone."""
    return read_text(PROC / str(pid) / "stat").rpartition(")")[2].split()


_SYSTEM: Final = Path("/sys")
_GPU_DRIVER: Final = Path("/proc/driver/nvidia/gpus")
_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # CUDA, ROCm, CUDA under WSL


@dataclass(frozen=True, slots=True)
class Machine:
    """The devices of a machine: GPUs for workers, logical cores for all of them, and the sign of a TPU, "" for none."""

    gpus: int
    cores: int
    tpu: str = ""


def look_at_machine() -> Machine:
    """Return the devices that the launcher's own process can see on this machine."""
    return Machine(count_gpus(), count_cores(), find_tpu(os.environ))


def count_gpus() -> int:
    """Count the GPUs that workers would see. Import torch only if a GPU driver is loaded.

    torch counts them, not nvidia-smi: a CPU build of torch, `CUDA_VISIBLE_DEVICES` and partitioned GPUs all matter.
    """
    if not has_gpu_driver():
        return 0
    import torch

    return int(torch.cuda.device_count())


def has_gpu_driver() -> bool:
    """Return whether a GPU driver is loaded. Without torch, no more can be known about GPUs."""
    return any(Path(driver).exists() for driver in _GPU_DRIVERS)


def count_cores() -> int:
    """Count the logical cores for this process: its affinity, limited by the CPU quotas of its control groups."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *_quotas()]))


def _quotas() -> Iterator[int]:
    """Yield the CPU quota of each of this process's control groups, in cores, rounded up."""
    for group in own_groups("cpu"):
        of_version_1 = (read_text(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        quota, period = (read_text(group / "cpu.max").split() or [*of_version_1])[:2]
        if quota.isdigit() and period.isdigit():  # "max", -1 or a missing file means no quota
            yield -(-int(quota) // int(period))


def port_is_free(port: int) -> bool:
    """Return whether a server could listen on TCP `port` of this machine now."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free for a server
        try:
            server.bind(("", port))
        except OSError:
            return False
    return True


@dataclass(frozen=True, slots=True)
class Binding:
    """The cores of each local rank, and the reason. Without cores, no process is bound."""

    cores: tuple[frozenset[int], ...]
    reason: str


def choose_cores(
    processes: int, gpus: tuple[str | None, ...] = (), allowed: Collection[int] | None = None, system: Path = _SYSTEM
) -> Binding:
    """Choose the cores that each process should be bound to; none if only one NUMA node is usable.

    A process gets the cores of its GPU's node. If a node is unknown, and on the CPU, each process gets an even share of
    the nodes: one node, or several if there are fewer processes than nodes.

    Args:
        processes: the number of processes on this machine.
        gpus: the PCI address of each process's GPU, None if unknown; empty on the CPU.
        allowed: the usable cores; by default this process's affinity.
        system: the folder in which the kernel lists nodes and devices.
    """
    if not hasattr(os, "sched_setaffinity"):
        return Binding((), "this system cannot bind processes to cores")
    usable = frozenset(os.sched_getaffinity(0) if allowed is None else allowed)
    nodes = {node: cores & usable for node, cores in read_nodes(system).items() if cores & usable}
    if len(nodes) < 2:
        return Binding((), "all usable cores are equally near to the memory: one NUMA node")
    near = [_node_of(gpu, system) for gpu in gpus]
    if near and all(node in nodes for node in near):
        return Binding(tuple(nodes[node] for node in near if node is not None), "the NUMA node of its GPU")
    shares = tuple(_share(list(nodes.values()), rank, processes) for rank in range(processes))
    why = f"an even share of {len(nodes)} NUMA nodes"
    return Binding(shares, f"{why}, since the GPUs' own are not known" if gpus else why)


def read_nodes(system: Path = _SYSTEM) -> dict[int, frozenset[int]]:
    """Return the logical cores of each NUMA node that has any."""
    nodes = {}
    for folder in (system / "devices" / "system" / "node").glob("node[0-9]*"):
        if cores := parse_cores(read_text(folder / "cpulist")):
            nodes[int(folder.name[4:])] = cores
    return dict(sorted(nodes.items()))


def find_gpus(processes: int, environ: Mapping[str, str], driver: Path = _GPU_DRIVER) -> tuple[str | None, ...]:
    """Return the PCI address of each local rank's GPU, in the order of NVIDIA's driver; None if it is not listed.

    Args:
        processes: the number of processes on this machine, with one GPU each.
        environ: the environment; `CUDA_VISIBLE_DEVICES` selects the visible GPUs.
        driver: the folder in which the driver lists its GPUs.
    """
    found = sorted(folder.name for folder in driver.glob("*:*"))
    names = environ.get("CUDA_VISIBLE_DEVICES", "")
    visible = [name.strip() for name in names.split(",")] if names else [str(n) for n in range(len(found))]
    uuids = {_uuid(driver / address): address for address in found}
    places = [found[int(name)] if name.isdigit() and int(name) < len(found) else uuids.get(name) for name in visible]
    return tuple(places[rank] if rank < len(places) else None for rank in range(processes))


def number_ranges(numbers: Collection[int]) -> str:
    """Return numbers of cores or ranks in the kernel's list format: `0-3,8`."""
    ordered = sorted(numbers)
    firsts = [number for number in ordered if number - 1 not in numbers]
    lasts = [number for number in ordered if number + 1 not in numbers]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(firsts, lasts, strict=True))


def _share(nodes: list[frozenset[int]], rank: int, processes: int) -> frozenset[int]:
    """Return the cores of one rank's nodes: neighbouring ranks share a node, or each rank has several."""
    first = rank * len(nodes) // processes
    last = max(first + 1, (rank + 1) * len(nodes) // processes)
    return frozenset().union(*nodes[first:last])


def _node_of(gpu: str | None, system: Path) -> int | None:
    number = "" if gpu is None else read_text(system / "bus" / "pci" / "devices" / gpu.lower() / "numa_node")
    return int(number) if number.isdigit() else None  # -1 means unknown


def _uuid(gpu: Path) -> str:
    lines = read_text(gpu / "information").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("GPU UUID")), "")


def parse_cores(text: str) -> frozenset[int]:
    """Parse the kernel's list format, e.g. `0-3,8` (Linux, Documentation/core-api/kernel-api, "CPU lists")."""
    cores: set[int] = set()
    for piece in text.strip().split(",") if text.strip() else ():
        first, _, last = piece.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


_LOOK_S: Final = 1.0
_STATUS: Final = Path("/proc/self/status")
_CAP_IPC_LOCK: Final = 14  # linux/capability.h
# Files of a control group of version 2, then 1: the limit and the usage. Then the prefixes of the counts in
# `memory.stat` that include the groups below (in version 2 all do): those of the lists, and of dirty pages.
_LIMITS: Final = (
    ("memory.max", "memory.current", "", "file_"),
    ("memory.high", "memory.current", "", "file_"),  # above this soft limit, the kernel slows processes to a crawl
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_", "total_"),
)


def total_cpu_memory() -> int:
    """Return the most bytes that this process and its workers may use: the machine's memory or the smallest limit.

    Limits are `ulimit -v` and those of the control groups (of a container or a scheduler's job), from this process's
    own group up to the root.
    """
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _limits())])


def available_cpu_memory() -> int:
    """Return the bytes that are available now without swapping: the kernel's estimate, or the rest of a limit if less.

    See `total_cpu_memory` for limits. Memory that `_reclaimable` counts is available although a limit includes it.
    """
    return max(0, min([int(psutil.virtual_memory().available), *(limit - taken for limit, taken in _limits())]))


class MemoryWatch:
    """A context that reads the memory every second.

    Attributes:
        available: available bytes at the last reading; None before the first one.
        resident: process id of each child → its bytes in memory at the last reading that found it.
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

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    @property
    def kills(self) -> int | None:
        """Number of processes that the kernel has killed for lack of memory since this object was created.

        None if the system does not count them. If this container has its own limit, only its processes count.
        """
        now = count_memory_kills()
        return None if now is None or self._kills_before is None else now - self._kills_before

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_S):
            self.available = available_cpu_memory()
            self.resident.update({pid: size for pid in _children() if (size := _resident_bytes(pid))})


def count_memory_kills() -> int | None:
    """Count the processes that the kernel has ever killed here because memory ran out; None if it does not count."""
    files = [folder / name for folder in own_groups("memory") for name in ("memory.events", "memory.oom_control")]
    files.append(PROC / "vmstat")  # the count of the whole machine
    counts = (read_numbers(file).get("oom_kill") for file in files)
    return next((count for count in counts if count is not None), None)


def largest_processes(count: int) -> list[tuple[int, int, str]]:
    """Return bytes in memory, id and name of the largest visible processes except this one, largest first."""
    numbers = [int(entry.name) for entry in PROC.glob("[0-9]*")]
    sizes = sorted(((_resident_bytes(pid), pid) for pid in numbers if pid != os.getpid()), reverse=True)
    return [(size, pid, read_text(PROC / str(pid) / "comm")) for size, pid in sizes[:count]]


def _limits() -> Iterator[tuple[int, int]]:
    """Yield every limit of this process's memory, and its used bytes. A huge number may stand for no limit."""
    for group in own_groups("memory"):
        for limit, taken, lists, writes in _LIMITS:
            size = read_text(group / limit)
            if size.isdigit():  # "max" or a missing file means no limit
                yield int(size), int(read_text(group / taken) or 0) - _reclaimable(group, lists, writes)
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if address_space != resource.RLIM_INFINITY:
        yield address_space, int(psutil.Process().memory_info().vms)


def _reclaimable(group: Path, lists: str, writes: str) -> int:
    """Return the bytes of a control group that the kernel frees before it refuses memory to a process.

    These are the file pages on its two reclaim lists. The kernel prefers the inactive list, but moves pages over from
    the active one when needed. So both count, as in the kernel's own `MemAvailable`. Dirty pages are on the same lists,
    but cannot be freed before they are on the disk, so they are subtracted.

    Other pages that a group counts as `file` are on other lists. Pages of tmpfs and shared memory have no file to read
    from again, and are on the anonymous lists. Locked pages are unevictable.
    """
    stat = Counter(read_numbers(group / "memory.stat"))
    on_lists = stat[f"{lists}inactive_file"] + stat[f"{lists}active_file"]
    return max(0, on_lists - stat[f"{writes}dirty"] - stat[f"{writes}writeback"])


def _children() -> list[int]:
    """Return the ids of the processes that any thread of this process has started."""
    return [int(pid) for task in PROC.glob("self/task/*/children") for pid in read_text(task).split()]


def _resident_bytes(pid: int) -> int:
    pages = read_text(PROC / str(pid) / "statm").split()[1:2]
    return int(pages[0]) * os.sysconf("SC_PAGE_SIZE") if pages else 0


def lockable_bytes() -> int | None:
    """Return the bytes that this process may lock (`ulimit -l`); None without a limit, as with CAP_IPC_LOCK or root."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    lines = read_text(_STATUS).splitlines()  # empty on systems other than Linux
    held = next((line for line in lines if line.startswith("CapEff:")), "CapEff: 0")
    has_capability = int(held.split()[1], 16) >> _CAP_IPC_LOCK & 1
    return None if limit == resource.RLIM_INFINITY or has_capability else limit


class Meter:
    """A meter of throughput between two readings.

    Args:
        processes: the number of processes. All are assumed to be as fast as this one.
        device: the device on which this process computes.
    """

    def __init__(self, processes: int, device: torch.device) -> None:
        self._processes = processes
        self._device = device
        self._since = time.perf_counter()

    def read(self, units: int, unit: str) -> dict[str, float]:
        """Return `<unit>_per_second` since the last reading, if `units` is not 0, and `memory_available_gb`."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        values = {f"{unit}_per_second": units * self._processes / max(seconds, 1e-9)} if units else {}
        return values | {"memory_available_gb": memory_available_bytes(self._device) / 1e9}


def memory_available_bytes(device: torch.device) -> int:
    """Return the available memory in bytes: of the GPU for a CUDA device, otherwise CPU memory."""
    if device.type == "cuda":
        import torch

        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # held by torch's allocator
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    return available_cpu_memory()


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Release the unused memory of torch's allocator to the device.

    Args:
        garbage_collection: collect garbage first, which takes long.
    """
    if garbage_collection:
        gc.collect()
    import torch

    torch.cuda.empty_cache()  # does nothing if CUDA was not used


# Measurement of a folder for NVMe offload: file system, free space, support of O_DIRECT, and speed.
_DISK_BLOCK: Final = 8 << 20
_DISK_SECONDS: Final = 0.4  # for writing, and again for reading
_DISK_MOST: Final = 512 << 20


@dataclass(frozen=True, slots=True)
class Disk:
    """The measurements of a folder. Speeds are in bytes per second, None if O_DIRECT is refused."""

    filesystem: str
    free: int
    direct: bool
    write: float | None = None
    read: float | None = None


def look_at_disk(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> Disk | None:
    """Measure a folder for about a second, with a temporary file; None if no file can be created.

    For a missing folder, its nearest existing parent is measured. The folder is not created.
    """
    there = existing_folder(folder)
    try:
        descriptor, name = tempfile.mkstemp(prefix=".zero_plugin_doctor_", dir=there)
    except OSError:
        return None
    os.close(descriptor)
    try:
        free = shutil.disk_usage(there).free
        speeds = _measure(name, min(_DISK_MOST, free // 4 // _DISK_BLOCK * _DISK_BLOCK))
    finally:
        Path(name).unlink(missing_ok=True)
    kind = filesystem_of(there, mounts)
    return Disk(kind, free, False) if speeds is None else Disk(kind, free, True, *speeds)


def existing_folder(folder: Path) -> Path:
    """Return the folder, or its nearest existing parent."""
    return next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())


def filesystem_of(folder: Path, mounts: Path) -> str:
    """Return the kind of a folder's file system, from the kernel's `mountinfo`."""
    above = [mount for mount in read_mounts(mounts) if folder.resolve().is_relative_to(mount.folder)]
    above.sort(
        key=lambda mount: len(mount.folder)
    )  # the sort is stable: of two mounts on one folder, the later one covers the other and stays last
    return above[-1].kind if above else "unknown"


def _measure(file: str, most: int) -> tuple[float, float] | None:
    """Measure writing and reading without the page cache, in bytes per second; None if O_DIRECT is refused."""
    if not hasattr(os, "O_DIRECT") or most < _DISK_BLOCK:
        return None
    block = mmap.mmap(-1, _DISK_BLOCK)  # O_DIRECT requires page-aligned memory
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_DIRECT)
    except OSError:
        return None
    try:
        block[:8] = b"doctor.."
        done, began = 0, time.perf_counter()
        while done < most and time.perf_counter() - began < _DISK_SECONDS:
            done += os.pwrite(descriptor, block, done)
        os.fdatasync(descriptor)
        written = done / max(time.perf_counter() - began, 1e-9)
        size, done, began = done, 0, time.perf_counter()
        while done < size and time.perf_counter() - began < _DISK_SECONDS:
            done += os.preadv(descriptor, [block], done)
        return written, done / max(time.perf_counter() - began, 1e-9)
    except OSError:
        return None
    finally:
        os.close(descriptor)
