"""What the launcher must know of this machine before it starts a process: GPUs, cores, ports.

Each process is bound to the cores of the memory near its GPU, or to an even share.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zero_plugin.machine.control_groups import own_groups, read_text
from zero_plugin.machine.xla_runtime import find_tpu

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
    """Cores that the processes of each of this process' control groups may use together, rounded up to whole ones."""
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
    """Bind each process to the cores of one NUMA node (of several nodes, where there are fewer processes than nodes).

    Args:
        processes: on this machine.
        gpus: the PCI address of each process's GPU, None where it is not known; empty on the CPU.
        allowed: cores that this process may use; by default its affinity.
        system: where the kernel tells of nodes and devices.
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
    """The PCI address of the GPU of each local rank, as NVIDIA's driver numbers them; None for what it does not tell.

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


def core_ranges(cores: Collection[int]) -> str:
    """Cores as the kernel writes them: `0-3,8`."""
    ordered = sorted(cores)
    firsts = [core for core in ordered if core - 1 not in cores]
    lasts = [core for core in ordered if core + 1 not in cores]
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
