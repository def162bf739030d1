"""What the launcher must know of this machine before it starts a process: GPUs, cores, ports."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from zero_plugin.machine.xla_runtime import find_tpu

_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # CUDA, ROCm, CUDA under WSL
_CGROUP = Path("/sys/fs/cgroup")


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
    """Logical cores that this process may use: its affinity, cut to the container's CPU quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(_CGROUP / "cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        allowed = min(allowed, -(-int(quota) // int(period)))
    return max(1, allowed)


def port_is_free(port: int) -> bool:
    """Whether a server could listen on TCP `port` of this machine now."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free for a server
        try:
            server.bind(("", port))
        except OSError:
            return False
    return True


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
