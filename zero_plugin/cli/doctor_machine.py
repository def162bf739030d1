"""Checks of `zero-plugin doctor` on the machine, and the needs of a configuration.

The checks cover memory, disks, folders, the machine's name, its ports, memory nodes, GPUs and TPU. They do not start
torch_xla.
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
    """The needs of a run on one machine.

    Attributes:
        deepspeed: whether the run uses ZeRO.
        on_gpu: whether the run computes on GPUs.
        processes: workers of this machine.
        ops: DeepSpeed's C++ and CUDA ops, by the names of their builders.
        nvme_folders: folders of NVMe offload.
        locked_bytes: minimum memory that all workers of the machine lock for NVMe offload.
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
    """Derive the needs from a checked document.

    Args:
        document: the configuration of the run.
        settings: the document's launch part.
        gpus: number of this machine's GPUs.
    """
    on_gpu = bool(gpus) and not asks_for_cpu(settings) and not asks_for_tpu(settings)
    processes = max(1, (settings.num_processes or (gpus if on_gpu else 1)) // settings.num_machines)
    needs = Needs(on_gpu=on_gpu, processes=processes, binds_cores=settings.enable_cpu_affinity)
    if not asks_for_deepspeed(document, settings):
        return needs
    training = document.deepspeed
    devices, kind = offload_devices(training), training.value("optimizer", "type")
    # Without a section the training loop brings its own optimizer, nearly always an Adam.
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
    """Return the bytes of one process's swap buffers for parameters, from their number and size in the config."""

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
    """Compare `ulimit -l` with the memory that NVMe offload locks.

    Args:
        limit: bytes that a process may lock, None for no limit.
        needs: `locked_bytes` counts all processes together. The limit is per process.
    """
    if limit is None:
        return Finding("locked memory", "ok", "no limit")
    found, each = f"{show_bytes(limit)} per process", needs.locked_bytes // needs.processes
    if each > limit:  # DeepSpeed gets no buffer at all
        found += f", and the swap buffers of offload_param lock {show_bytes(each)}"
        return Finding("locked memory", "wrong", found, _UNLIMITED)
    if not needs.nvme_folders:
        return Finding("locked memory", "ok", f"{found}; only NVMe offload locks more")
    found += "; NVMe offload locks buffers of the size of the model's largest weights"
    scarce = limit < _SMALL_LOCKED
    return Finding("locked memory", "warning" if scarce else "ok", found, _UNLIMITED if scarce else "")


def check_shared_memory(size: int | None, free: int, needs: Needs) -> Finding:
    """Check the file system through which data loader workers and NCCL pass batches and buffers.

    Args:
        size: bytes of the file system, None if it does not exist.
        free: unused bytes.
        needs: the needs of the run.
    """
    fix = "mount -o remount,size=8G /dev/shm   (docker run --shm-size=8g, or --ipc=host)"
    if size is None:
        return Finding(_SHARED, "wrong" if needs.processes > 1 else "warning", "does not exist", fix)
    found = f"{show_bytes(free)} of {show_bytes(size)} free"
    if free < _SMALL_SHARED:
        found += "; if it is full, a DataLoader worker dies of SIGBUS"
        return Finding(_SHARED, "warning", found, fix if size < _SMALL_SHARED else "ls -lS /dev/shm, and remove files.")
    return Finding(_SHARED, "ok", found)


def check_host_memory(total: int, available: int, needs: Needs) -> Finding:
    """Check the CPU memory that is left for weights and optimizer states.

    Args:
        total: bytes that the run may use.
        available: bytes that are available now.
        needs: the needs of the run.
    """
    processes = f"{needs.processes} process{'es' * (needs.processes > 1)}"
    found = f"{show_bytes(available)} of {show_bytes(total)} free, for {processes}"
    if needs.offloads_to_host and available < _LITTLE_LEFT * needs.processes:
        found += "; offload to the CPU with Adam keeps 12 bytes there for each parameter"
        return Finding("CPU memory", "warning", found, "Stop other programs, or offload to nvme instead of cpu.")
    return Finding("CPU memory", "ok", found)


_NETWORK: Final = ("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "gpfs", "beegfs", "fuse.sshfs", "9p", "afs")
_SLOW: Final = 0.5e9  # bytes per second: a step would wait for the disk most of the time
_LITTLE: Final = 20e9  # bytes


def check_disk(folder: str, disk: Disk | None) -> Iterator[Finding]:
    """Check one folder for NVMe offload.

    Args:
        folder: the folder's name in the configuration.
        disk: the measurement; None if no file can be created there.
    """
    name = f"NVMe {folder}"
    elsewhere = (
        "Write a folder on a local NVMe disk (xfs, ext4) for nvme_path; `lsblk -o NAME,ROTA,MOUNTPOINT` lists disks."
    )
    if disk is None:
        yield Finding(name, "wrong", "no file can be created there", f"mkdir -p {folder} && chmod u+rwx {folder}")
        return
    level: Level = "wrong"
    if disk.filesystem in ("tmpfs", "ramfs"):
        found = f"{disk.filesystem}: a RAM disk uses the memory that offload should save"
    elif disk.filesystem in _NETWORK:
        level, found = "warning", f"{disk.filesystem}: every step reads and writes every weight over the network"
    elif not disk.direct:
        found = f"{disk.filesystem} refuses O_DIRECT, which DeepSpeed needs"
    else:
        level, found = "ok", f"{disk.filesystem}, supports O_DIRECT"
    yield Finding(name, level, found, "" if level == "ok" else elsewhere)
    little = disk.free < _LITTLE
    fix = "Free space: 12 bytes for each parameter with Adam, 2 more for 16-bit weights."
    yield Finding(f"{name} room", "warning" if little else "ok", f"{show_bytes(disk.free)} free", fix if little else "")
    if disk.write is not None and disk.read is not None:
        found = f"writes {disk.write / 1e9:.2g} GB/s, reads {disk.read / 1e9:.2g} GB/s"
        slow = min(disk.write, disk.read) < _SLOW
        yield Finding(f"{name} speed", "warning" if slow else "ok", found, elsewhere if slow else "")


# ---- folders, names, devices -----------------------------------------------------------------------------------------


def check_folders(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check TMPDIR (sockets, logs and temporary files) and HOME (built ops and records)."""
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
            yield Finding(name, "wrong", found, f"export {name}=…, a writable folder")
        else:
            yield Finding(name, "ok", folder)


def check_hostname(name: str, *, machines: int) -> Finding:
    """Check that this machine's name resolves to an address, which gloo and NCCL look up.

    Args:
        name: this machine's name.
        machines: machines of the run. A single machine reaches itself by `localhost`.
    """
    try:
        address = str(socket.getaddrinfo(name, None)[0][4][0])
    except (OSError, UnicodeError):
        fix = f'echo "127.0.1.1 {name}" | sudo tee -a /etc/hosts   (with several machines: its network address instead)'
        return Finding("hostname", "warning" if machines == 1 else "wrong", f"{name} resolves to no address", fix)
    if machines > 1 and address.startswith("127."):
        fix = f"Write {name}'s network address in /etc/hosts, or export GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME."
        return Finding("hostname", "warning", f"{name} resolves to {address}, which other machines cannot reach", fix)
    return Finding("hostname", "ok", f"{name} → {address}")


def check_port(port: int | None) -> Finding:
    """Check the configured port, or that a free port is available."""
    if port and not port_is_free(port):
        fix = f"ss -ltnp 'sport = :{port}' shows the process that uses it; or name another port."
        return Finding("port", "wrong", f"{port} is taken", fix)
    if port:
        return Finding("port", "ok", f"{port} is free")
    try:
        with socket.socket() as server:
            server.bind(("localhost", 0))
    except OSError as error:
        fix = "ip link set lo up   (the loopback interface)"
        return Finding("port", "wrong", f"cannot listen on localhost: {error.strerror}", fix)
    return Finding("port", "ok", "each start takes a free port")


def check_nodes(nodes: Mapping[int, frozenset[int]], needs: Needs) -> Finding:
    """Check for memory that is nearer to some cores than to others.

    Args:
        nodes: cores by NUMA node.
        needs: the needs of the run.
    """
    if len(nodes) < 2:
        return Finding("NUMA", "ok", "one node: all memory is equally near")
    shown = ", ".join(f"{node}: cores {number_ranges(cores)}" for node, cores in nodes.items())
    found = f"{len(nodes)} nodes ({shown})"
    if needs.offloads_to_host and not needs.binds_cores:
        found += "; offload to the CPU is faster in memory of its own node"
        fix = "Add enable_cpu_affinity: true (zero-plugin launch --enable_cpu_affinity)"
        return Finding("NUMA", "warning", found, fix)
    return Finding("NUMA", "ok", found)


def check_gpus(
    names: list[str], environ: Mapping[str, str], *, driver: bool, torch_cuda: bool, requested: str
) -> Finding:
    """Check the GPUs that torch sees.

    Args:
        names: names of the GPUs.
        environ: the environment; `CUDA_VISIBLE_DEVICES` may hide GPUs.
        driver: whether a GPU driver is loaded.
        torch_cuda: whether torch is built with CUDA or ROCm.
        requested: the part of the configuration that requests GPUs, "" for none.
    """
    level: Level = "wrong" if requested else "warning"
    if names:
        return Finding("GPUs", "ok", ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names)))
    if driver and not torch_cuda:
        fix = "pip install torch --index-url https://download.pytorch.org/whl/cu128"
        return Finding("GPUs", level, "a driver is loaded, but torch is built for the CPU", fix)
    if driver:
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            return Finding("GPUs", level, f"none with CUDA_VISIBLE_DEVICES={visible}", "unset CUDA_VISIBLE_DEVICES")
        return Finding("GPUs", level, "a driver is loaded, but torch sees no GPU", "nvidia-smi   (and its advice)")
    if requested:
        found = f"none: the run is on the CPU, although {requested}"
        return Finding("GPUs", "warning", found, "If that is intended, write use_cpu: true.")
    return Finding("GPUs", "ok", "none; runs are on the CPU")


def check_tpu(seen: str, environ: Mapping[str, str], *, requested: bool) -> Finding:
    """Check torch_xla's version, and the device that it would use.

    Args:
        seen: the sign of a TPU on this machine, "" for none.
        environ: the environment; `PJRT_DEVICE` selects torch_xla's device.
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
