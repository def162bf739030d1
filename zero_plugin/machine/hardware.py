"""This machine's GPUs, cores, ports, memory and disks, as far as this process may use them.

Everything in this package that asks for one of them asks here; torch is imported for GPUs alone. A container or a
scheduler's job is limited by its control groups, which are read first. Each process of a run is bound to the cores of
the memory near its GPU, or to an even share.
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
    """A line of `mountinfo`: which part of a file system is seen at which folder, its kind and its options."""

    root: str
    folder: str
    kind: str
    options: tuple[str, ...]


def own_groups(controller: str) -> Iterator[Path]:
    """Folders of this process' control groups, of either version, its own first, then those above it.

    A limit of each of them holds for this process.

    Args:
        controller: whose groups, where each controller has its own (version 1), e.g. `memory` or `cpu`.
    """
    own = {}
    for line in read_text(PROC / "self" / "cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), group))
    for mount in read_mounts(PROC / "self" / "mountinfo"):
        name = {"cgroup2": "", "cgroup": controller}.get(mount.kind)
        if name in own and (name == "" or name in mount.options):
            inside = Path(own[name])  # of a container the own group may be mounted as the root
            folder = Path(mount.folder, inside.relative_to(mount.root) if inside.is_relative_to(mount.root) else "")
            yield from (group for group in (folder, *folder.parents) if group.is_relative_to(mount.folder))


def read_mounts(mountinfo: Path) -> Iterator[Mount]:
    """The mounts that a file of the kernel lists, in their order; of two on one folder the later covers the earlier."""
    for line in read_text(mountinfo).splitlines():
        before, _, after = line.partition(" - ")
        root, folder = (word.encode().decode("unicode_escape") for word in before.split()[3:5])
        kind, *_, options = after.split()
        yield Mount(root, folder, kind, tuple(options.split(",")))


def read_numbers(file: Path) -> dict[str, int]:
    """A file of lines `name number`; empty where there is none."""
    words = (line.split() for line in read_text(file).splitlines())
    return {line[0]: int(line[1]) for line in words if len(line) == 2 and line[1].isdigit()}


def read_text(file: Path) -> str:
    """The text without the blanks around it; "" where there is no such file, or it may not be read."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


def process_stat(pid: int) -> list[str]:
    """Of a process, its state, its parent's number and more, as the kernel lists them; empty where it is gone."""
    return read_text(PROC / str(pid) / "stat").rpartition(")")[2].split()


_SYSTEM: Final = Path("/sys")
_GPU_DRIVER: Final = Path("/proc/driver/nvidia/gpus")
_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # CUDA, ROCm, CUDA under WSL


@dataclass(frozen=True, slots=True)
class Machine:
    """GPUs that workers would see, logical cores that they may use together, and by what a TPU is seen, "" for none."""

    gpus: int
    cores: int
    tpu: str = ""


def look_at_machine() -> Machine:
    """This machine, as the launcher's own process sees it."""
    return Machine(count_gpus(), count_cores(), find_tpu(os.environ))


def count_gpus() -> int:
    """GPUs that workers would see; torch is asked (and imported) only where a GPU driver is loaded.

    torch rather than nvidia-smi: a CPU build of torch, `CUDA_VISIBLE_DEVICES` and partitioned GPUs all count.
    """
    if not has_gpu_driver():
        return 0
    import torch

    return int(torch.cuda.device_count())


def has_gpu_driver() -> bool:
    """Whether a GPU driver is loaded, which is all that can be known of GPUs without torch."""
    return any(Path(driver).exists() for driver in _GPU_DRIVERS)


def count_cores() -> int:
    """Logical cores that this process may use: its affinity, cut to the least CPU quota of its control groups."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *_quotas()]))


def _quotas() -> Iterator[int]:
    """Cores that the processes of each of this process' control groups may use together, rounded up to an integer."""
    for group in own_groups("cpu"):
        of_version_1 = (read_text(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        quota, period = (read_text(group / "cpu.max").split() or [*of_version_1])[:2]
        if quota.isdigit() and period.isdigit():  # else "max" or -1, or no such file
            yield -(-int(quota) // int(period))


def port_is_free(port: int) -> bool:
    """Whether a server could listen on TCP `port` of this machine now."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free for a server
        try:
            server.bind(("", port))
        except OSError:
            return False
    return True


@dataclass(frozen=True, slots=True)
class Binding:
    """The cores of each local rank, none where nothing is to be bound, and why."""

    cores: tuple[frozenset[int], ...]
    reason: str


def choose_cores(
    processes: int, gpus: tuple[str | None, ...] = (), allowed: Collection[int] | None = None, system: Path = _SYSTEM
) -> Binding:
    """The cores that each process should be bound to; none if there is only one usable NUMA node.

    They are those of the node of its GPU. Where these nodes are not known, and on the CPU, each process gets an even
    share of the nodes' cores: one node, or several where there are fewer processes than nodes.

    Args:
        processes: on this machine.
        gpus: the PCI address of each process's GPU, None where it is not known; empty on the CPU.
        allowed: the cores that may be used; by default this process's affinity.
        system: where the kernel lists nodes and devices.
    """
    if not hasattr(os, "sched_setaffinity"):
        return Binding((), "this system binds no process to cores")
    usable = frozenset(os.sched_getaffinity(0) if allowed is None else allowed)
    nodes = {node: cores & usable for node, cores in read_nodes(system).items() if cores & usable}
    if len(nodes) < 2:
        return Binding((), "all cores that may be used here are equally near to the memory: one NUMA node")
    near = [_node_of(gpu, system) for gpu in gpus]
    if near and all(node in nodes for node in near):
        return Binding(tuple(nodes[node] for node in near if node is not None), "the NUMA node of its GPU")
    shares = tuple(_share(list(nodes.values()), rank, processes) for rank in range(processes))
    why = f"an even share of {len(nodes)} NUMA nodes"
    return Binding(shares, f"{why}, since the GPUs' own are not known" if gpus else why)


def read_nodes(system: Path = _SYSTEM) -> dict[int, frozenset[int]]:
    """The logical cores of each NUMA node that has any."""
    nodes = {}
    for folder in (system / "devices" / "system" / "node").glob("node[0-9]*"):
        if cores := parse_cores(read_text(folder / "cpulist")):
            nodes[int(folder.name[4:])] = cores
    return dict(sorted(nodes.items()))


def find_gpus(processes: int, environ: Mapping[str, str], driver: Path = _GPU_DRIVER) -> tuple[str | None, ...]:
    """The PCI address of the GPU of each local rank, as NVIDIA's driver numbers them; None for what it does not list.

    Args:
        processes: on this machine, on one GPU each.
        environ: `CUDA_VISIBLE_DEVICES` says which GPUs they see.
        driver: where the driver lists its GPUs.
    """
    found = sorted(folder.name for folder in driver.glob("*:*"))
    names = environ.get("CUDA_VISIBLE_DEVICES", "")
    visible = [name.strip() for name in names.split(",")] if names else [str(n) for n in range(len(found))]
    uuids = {_uuid(driver / address): address for address in found}
    places = [found[int(name)] if name.isdigit() and int(name) < len(found) else uuids.get(name) for name in visible]
    return tuple(places[rank] if rank < len(places) else None for rank in range(processes))


def number_ranges(numbers: Collection[int]) -> str:
    """Numbers, of cores or ranks, as the kernel writes those of cores: `0-3,8`."""
    ordered = sorted(numbers)
    firsts = [number for number in ordered if number - 1 not in numbers]
    lasts = [number for number in ordered if number + 1 not in numbers]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(firsts, lasts, strict=True))


def _share(nodes: list[frozenset[int]], rank: int, processes: int) -> frozenset[int]:
    """The nodes of one rank: neighbours share one, or each has several."""
    first = rank * len(nodes) // processes
    last = max(first + 1, (rank + 1) * len(nodes) // processes)
    return frozenset().union(*nodes[first:last])


def _node_of(gpu: str | None, system: Path) -> int | None:
    number = "" if gpu is None else read_text(system / "bus" / "pci" / "devices" / gpu.lower() / "numa_node")
    return int(number) if number.isdigit() else None  # -1: not known


def _uuid(gpu: Path) -> str:
    lines = read_text(gpu / "information").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("GPU UUID")), "")


def parse_cores(text: str) -> frozenset[int]:
    """The kernel's list format, e.g. `0-3,8` (Linux, Documentation/core-api/kernel-api, "CPU lists")."""
    cores: set[int] = set()
    for piece in text.strip().split(",") if text.strip() else ():
        first, _, last = piece.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


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

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    @property
    def kills(self) -> int | None:
        """Processes that the kernel has killed since for want of memory, in this container where it has a limit of
        its own; None where the system does not count them."""
        now = count_memory_kills()
        return None if now is None or self._kills_before is None else now - self._kills_before

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_S):
            self.available = available_cpu_memory()
            self.resident.update({pid: size for pid in _children() if (size := _resident_bytes(pid))})


def count_memory_kills() -> int | None:
    """Processes that the kernel has ever killed here for want of memory; None where it does not count them."""
    files = [folder / name for folder in own_groups("memory") for name in ("memory.events", "memory.oom_control")]
    files.append(PROC / "vmstat")  # the complete machine's
    counts = (read_numbers(file).get("oom_kill") for file in files)
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


class Meter:
    """Throughput between two readings.

    Args:
        processes: how many run, each taken to be as fast as this one.
        device: where this process computes.
    """

    def __init__(self, processes: int, device: torch.device) -> None:
        self._processes = processes
        self._device = device
        self._since = time.perf_counter()

    def read(self, units: int, unit: str) -> dict[str, float]:
        """`<unit>_per_second` since the last reading, if any `units` are given, and `memory_available_gb`."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        values = {f"{unit}_per_second": units * self._processes / max(seconds, 1e-9)} if units else {}
        return values | {"memory_available_gb": memory_available_bytes(self._device) / 1e9}


def memory_available_bytes(device: torch.device) -> int:
    """Memory that could still be taken: of a GPU, else of the CPUs."""
    if device.type == "cuda":
        import torch

        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch's allocator
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    return available_cpu_memory()


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Return the memory that torch's allocator holds unused to the device.

    Args:
        garbage_collection: collect garbage first, which takes long.
    """
    if garbage_collection:
        gc.collect()
    import torch

    torch.cuda.empty_cache()  # does nothing where CUDA was not used


# A folder for NVMe offload: its file system, its free space, whether it takes O_DIRECT, and how fast it is.
_DISK_BLOCK: Final = 8 << 20
_DISK_SECONDS: Final = 0.4  # each of writing and reading
_DISK_MOST: Final = 512 << 20


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
    """The folder, or the nearest one above it that is there."""
    return next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())


def filesystem_of(folder: Path, mounts: Path) -> str:
    """The kind of file system that a folder is on, from the kernel's `mountinfo`."""
    above = [mount for mount in read_mounts(mounts) if folder.resolve().is_relative_to(mount.folder)]
    above.sort(
        key=lambda mount: len(mount.folder)
    )  # of two on one folder the later stays the last: it covers the other
    return above[-1].kind if above else "unknown"


def _measure(file: str, most: int) -> tuple[float, float] | None:
    """Bytes per second of writing and of reading past the page cache; None where O_DIRECT is refused."""
    if not hasattr(os, "O_DIRECT") or most < _DISK_BLOCK:
        return None
    block = mmap.mmap(-1, _DISK_BLOCK)  # O_DIRECT wants memory at a page's border
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
