"""What the launcher must know of this machine before it starts a process: GPUs, cores, ports."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zero_plugin.machine.control_groups import own_groups, read_text
from zero_plugin.machine.xla_runtime import find_tpu

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
