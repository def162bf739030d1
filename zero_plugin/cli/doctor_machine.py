"""What `zero-plugin doctor` checks of a machine, and what a configuration needs of it.

Memory, disks, folders, the machine's name, its ports, memory nodes, GPUs and TPU; torch_xla is not woken.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from zero_plugin.cli.output import Finding, Level
from zero_plugin.config.amounts import show_bytes
from zero_plugin.config.document import Document, nvme_folders, offload_devices
from zero_plugin.config.installed import installed_version
from zero_plugin.config.keys import LaunchSettings
from zero_plugin.config.launch_settings import asks_for_cpu, asks_for_deepspeed, asks_for_tpu
from zero_plugin.config.schema import deepspeed_default
from zero_plugin.config.tree import AUTO, Tree
from zero_plugin.machine.hardware import Disk, number_ranges, port_is_free
from zero_plugin.machine.op_builds import needed_ops
from zero_plugin.machine.xla_runtime import PJRT_DEVICE, find_version_problem


@dataclass(frozen=True, slots=True)
class Needs:
    """What a run takes from one machine.

    Attributes:
        deepspeed: whether it is a ZeRO run.
        on_gpu: whether it computes on GPUs.
        processes: workers of this machine.
        ops: DeepSpeed's C++ and CUDA ops, by the names of their builders.
        nvme_folders: where offload keeps its files.
        locked_bytes: memory that all workers of the machine lock for NVMe offload at the least.
        offloads_to_host: whether weights or optimizer states are in CPU memory.
        binds_cores: whether processes are bound to cores.
    """

    deepspeed: bool = False
    on_gpu: bool = False
    processes: int = 1
    ops: tuple[str, ...] = ()
    nvme_folders: tuple[str, ...] = ()
    locked_bytes: int = 0
    offloads_to_host: bool = False
    binds_cores: bool = False

    @property
    def cuda_ops(self) -> tuple[str, ...]:
        """The `ops` that nvcc compiles."""
        return tuple(op for op in self.ops if op in ("fused_adam", "fused_lion", "fused_lamb", "quantizer"))


def find_needs(document: Document, settings: LaunchSettings, gpus: int) -> Needs:
    """Read the needs off a checked document.

    Args:
        document: what would run.
        settings: its launch part.
        gpus: of this machine.
    """
    on_gpu = bool(gpus) and not asks_for_cpu(settings) and not asks_for_tpu(settings)
    processes = max(1, (settings.num_processes or (gpus if on_gpu else 1)) // settings.num_machines)
    needs = Needs(on_gpu=on_gpu, processes=processes, binds_cores=settings.enable_cpu_affinity)
    if not asks_for_deepspeed(document, settings):
        return needs
    training = document.deepspeed
    devices, kind = offload_devices(training), training.value("optimizer", "type")
    # Without a section the loop brings its own optimizer: nearly always an Adam.
    optimizer = "adamw" if kind in (None, AUTO) else str(kind).lower()
    return replace(
        needs,
        deepspeed=True,
        ops=tuple(needed_ops(training, optimizer, on_gpu=on_gpu)),
        nvme_folders=tuple(nvme_folders(training)),
        locked_bytes=processes * _swap_buffer_bytes(training) if devices["param"] == "nvme" else 0,
        offloads_to_host="cpu" in devices.values(),
    )


def _swap_buffer_bytes(training: Tree) -> int:
    """The size of one process' swap buffers for parameters; their number and size are in the configuration."""

    def number(key: str) -> int:
        path = ("zero_optimization", "offload_param", key)
        value: Any = training.value(*path)
        if value in (None, AUTO):
            default = deepspeed_default(path)
            value = 0 if default is None else default[0]
        return int(value)

    half = any(training.value(name, "enabled") is not False and training.has_section(name) for name in ("bf16", "fp16"))
    return number("buffer_count") * number("buffer_size") * (2 if half else 4)


# ---- memory and disks ------------------------------------------------------------------------------------------------

_SHARED = "/dev/shm"  # noqa: S108 - the check's name
_SMALL_LOCKED = 1 << 30  # bytes: a swapped gradient or weight of a model that needs NVMe
_SMALL_SHARED = 1 << 30  # bytes; docker gives 64 MiB by default
_UNLIMITED = (
    "ulimit -l unlimited   (as root: two lines `* soft memlock unlimited`, `* hard memlock unlimited` in "
    "/etc/security/limits.conf; docker run --ulimit memlock=-1)"
)
_LITTLE_LEFT = 4 << 30  # bytes for a process that offloads to CPU memory


def check_locked_memory(limit: int | None, needs: Needs) -> Finding:
    """`ulimit -l` against what NVMe offload locks.

    Args:
        limit: bytes that a process may lock, None for no limit.
        needs: `locked_bytes` is of all processes; the limit is of each.
    """
    if limit is None:
        return Finding("locked memory", "ok", "no limit")
    found, each = f"{show_bytes(limit)} per process", needs.locked_bytes // needs.processes
    if each > limit:  # DeepSpeed gets no buffer at all
        found += f", and the swap buffers of offload_param lock {show_bytes(each)}"
        return Finding("locked memory", "wrong", found, _UNLIMITED)
    if not needs.nvme_folders:
        return Finding("locked memory", "ok", f"{found}; only NVMe offload locks more")
    found += "; NVMe offload locks its buffers, as much as the model's largest weights"
    scarce = limit < _SMALL_LOCKED
    return Finding("locked memory", "warning" if scarce else "ok", found, _UNLIMITED if scarce else "")


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
    """What is left for weights and optimizer states in CPU memory.

    Args:
        total: bytes that the run may have.
        available: bytes that could be taken now.
        needs: of the run.
    """
    processes = f"{needs.processes} process{'es' * (needs.processes > 1)}"
    found = f"{show_bytes(available)} of {show_bytes(total)} free, for {processes}"
    if needs.offloads_to_host and available < _LITTLE_LEFT * needs.processes:
        found += "; offload to the CPU keeps 12 bytes there for each parameter with Adam"
        return Finding("CPU memory", "warning", found, "Stop what else runs, or offload to nvme in place of cpu.")
    return Finding("CPU memory", "ok", found)


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
    level: Level = "wrong"
    if disk.filesystem in ("tmpfs", "ramfs"):
        found = f"{disk.filesystem}: a RAM disk, which takes the memory that it is to save"
    elif disk.filesystem in _NETWORK:
        level, found = "warning", f"{disk.filesystem}: over the network, for every weight at every step"
    elif not disk.direct:
        found = f"{disk.filesystem} refuses O_DIRECT, by which DeepSpeed reads and writes"
    else:
        level, found = "ok", f"{disk.filesystem}, takes O_DIRECT"
    yield Finding(name, level, found, "" if level == "ok" else elsewhere)
    little = disk.free < _LITTLE
    fix = "Make room: 12 bytes for each parameter with Adam, 2 more for weights in 16 bits."
    yield Finding(f"{name} room", "warning" if little else "ok", f"{show_bytes(disk.free)} free", fix if little else "")
    if disk.write is not None and disk.read is not None:
        found = f"writes {disk.write / 1e9:.2g} GB/s, reads {disk.read / 1e9:.2g} GB/s"
        slow = min(disk.write, disk.read) < _SLOW
        yield Finding(f"{name} speed", "warning" if slow else "ok", found, elsewhere if slow else "")


# ---- folders, names, devices -----------------------------------------------------------------------------------------


def check_folders(environ: Mapping[str, str]) -> Iterator[Finding]:
    """TMPDIR and HOME: sockets, logs and handed-over files go to the first, built ops and records to the second."""
    temporary = environ.get("TMPDIR") or "/tmp"  # noqa: S108 - the system's own default
    for name, folder in (("TMPDIR", temporary), ("HOME", environ.get("HOME", ""))):
        if not folder:
            yield Finding(name, "warning", "is not set", f"export {name}=…, a folder of your own")
            continue
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"doctor")
        except OSError as error:
            found = f"{folder}: {str(error.strerror).lower()}"
            yield Finding(name, "wrong", found, f"export {name}=…, a folder that can be written")
        else:
            yield Finding(name, "ok", folder)


def check_hostname(name: str, *, machines: int) -> Finding:
    """Whether this machine's own name leads to an address; gloo and NCCL ask for it.

    Args:
        name: of this machine.
        machines: of the run; one finds itself by `localhost`.
    """
    try:
        address = str(socket.getaddrinfo(name, None)[0][4][0])
    except (OSError, UnicodeError):
        fix = f'echo "127.0.1.1 {name}" | sudo tee -a /etc/hosts   (with several machines: its address in place of it)'
        return Finding("hostname", "warning" if machines == 1 else "wrong", f"{name} leads to no address", fix)
    if machines > 1 and address.startswith("127."):
        fix = f"Let {name} lead to its address in /etc/hosts, or export GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME."
        return Finding("hostname", "warning", f"{name} leads to {address}, which no other machine reaches", fix)
    return Finding("hostname", "ok", f"{name} → {address}")


def check_port(port: int | None) -> Finding:
    """The port that the configuration names, or that a free one can be had."""
    if port and not port_is_free(port):
        fix = f"ss -ltnp 'sport = :{port}' says by whom; or name another."
        return Finding("port", "wrong", f"{port} is taken", fix)
    if port:
        return Finding("port", "ok", f"{port} is free")
    try:
        with socket.socket() as server:
            server.bind(("localhost", 0))
    except OSError as error:
        fix = "ip link set lo up   (the loopback interface)"
        return Finding("port", "wrong", f"localhost cannot be listened at: {error.strerror}", fix)
    return Finding("port", "ok", "a free one is taken at each start")


def check_nodes(nodes: Mapping[int, frozenset[int]], needs: Needs) -> Finding:
    """Memory that is nearer to some cores than to others.

    Args:
        nodes: cores by NUMA node.
        needs: of the run.
    """
    if len(nodes) < 2:
        return Finding("NUMA", "ok", "one node: all memory is equally near")
    shown = ", ".join(f"{node}: cores {number_ranges(cores)}" for node, cores in nodes.items())
    found = f"{len(nodes)} nodes ({shown})"
    if needs.offloads_to_host and not needs.binds_cores:
        found += "; offload to the CPU works on memory of its own node faster"
        fix = "Add enable_cpu_affinity: true (zero-plugin launch --enable_cpu_affinity)"
        return Finding("NUMA", "warning", found, fix)
    return Finding("NUMA", "ok", found)


def check_gpus(
    names: list[str], environ: Mapping[str, str], *, driver: bool, torch_cuda: bool, requested: str
) -> Finding:
    """GPUs that torch sees.

    Args:
        names: of the GPUs.
        environ: `CUDA_VISIBLE_DEVICES` may hide them.
        driver: whether a GPU driver is loaded.
        torch_cuda: whether torch is built with CUDA or ROCm.
        requested: what of the configuration requests GPUs, "" for nothing.
    """
    level: Level = "wrong" if requested else "warning"
    if names:
        return Finding("GPUs", "ok", ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names)))
    if driver and not torch_cuda:
        fix = "pip install torch --index-url https://download.pytorch.org/whl/cu128"
        return Finding("GPUs", level, "a driver is loaded, and torch is a build for the CPU", fix)
    if driver:
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            return Finding("GPUs", level, f"none with CUDA_VISIBLE_DEVICES={visible}", "unset CUDA_VISIBLE_DEVICES")
        return Finding("GPUs", level, "a driver is loaded, and torch sees no GPU", "nvidia-smi   (and its advice)")
    if requested:
        found = f"none: the run is on the CPU, although {requested}"
        return Finding("GPUs", "warning", found, "Write use_cpu: true to mean it.")
    return Finding("GPUs", "ok", "none; runs are on the CPU")


def check_tpu(seen: str, environ: Mapping[str, str], *, requested: bool) -> Finding:
    """torch_xla's version, and what it would run on.

    Args:
        seen: by what a TPU is seen here, "" for none.
        environ: `PJRT_DEVICE` says what torch_xla runs on.
        requested: whether the configuration requests a TPU.
    """
    version = installed_version("torch_xla")
    found = f"torch_xla {version}" if version else "torch_xla is not installed"
    chosen = environ.get(PJRT_DEVICE)
    where = seen or (f"{PJRT_DEVICE} is {chosen}" if chosen else "")
    if (requested or seen) and (problem := find_version_problem()):
        message, _, fix = problem.partition(": ")
        return Finding("TPU", "wrong" if requested else "warning", f"{message} ({where or 'none here'})", fix)
    if requested and chosen == "CPU":
        fix = f"unset {PJRT_DEVICE}   (to train on the TPU)"
        return Finding("TPU", "warning", f"{found}; {where}: the TPU path is tried on the CPU", fix)
    if requested and not seen:
        fix = f"{PJRT_DEVICE}=CPU zero-plugin launch …   (tries the path on the CPU)"
        return Finding("TPU", "wrong", f"{found}; there is no TPU here{f', and {where}' if where else ''}", fix)
    return Finding("TPU", "ok", f"{found}; {where}" if where else f"none{f'; {found}' if version else ''}")
