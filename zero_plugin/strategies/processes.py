"""The processes of a run: rank, device and process group, started from whatever launcher set the environment."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from zero_plugin.agreement import collective, end_watching, start_watching
from zero_plugin.errors import LaunchError

__all__ = ["Processes", "start_processes"]

_COORDINATES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}  # what a group of one leaves in the environment


@dataclass(frozen=True, slots=True)
class Processes:
    """This process among its peers.

    Attributes:
        rank, local_rank: index among all processes, and on this machine.
        world_size: number of processes.
        device: where this process computes.
        owns_group: whether this package made the process group, and so has to end it.
        launched: whether a launcher set the environment that describes the group.
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    owns_group: bool
    launched: bool

    @collective("wait_for_everyone")
    def barrier(self) -> None:
        """Wait for every process."""
        if self.world_size > 1:
            dist.barrier(device_ids=[self.device.index or 0] if self.device.type == "cuda" else None)

    def stop(self, destroy_group: Callable[[], None]) -> None:
        """End the process group, if this package made it.

        Sessions are closed before: gloo aborts at exit while DDP or an engine holds it.
        """
        # Engines and DDP sit in reference cycles that hold the group, also one that the user made and will end: while
        # four closed stage-3 engines did, one run in eight aborted at its exit; with this, none of 32.
        gc.collect()
        if self.owns_group and dist.is_initialized():
            self.barrier()
            end_watching()
            destroy_group()
            if not self.launched:
                for name in _ALONE:
                    os.environ.pop(name, None)


def start_processes(*, cpu: bool, backend: str | None = None, timeout: timedelta | None = None) -> Processes:
    """Join the process group that the launcher's environment describes; without a launcher, a group of one.

    A group that exists already is taken as it is. There is one with one process too, since a ZeRO engine needs it.

    Args:
        cpu: compute on the CPU even where there is a GPU.
        backend: `nccl` or `gloo`; by default NCCL with gloo beside it for CPU tensors, or gloo on CPUs.
        timeout: how long a collective may wait.

    Raises:
        LaunchError: the environment describes a part of a process group only.
    """
    owns_group = not dist.is_initialized()
    launched = owns_group and _is_launched()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    cuda = torch.cuda.is_available() and not cpu
    if cuda and local_rank >= torch.cuda.device_count():
        raise LaunchError(
            f"the process of local rank {local_rank} has no GPU: this machine has {torch.cuda.device_count()}.\n"
            f"Start at most {torch.cuda.device_count()} processes on this machine (--num_processes), or add --cpu."
        )
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if owns_group:
        backend = backend or ("cpu:gloo,cuda:nccl" if cuda else "gloo")
        wait = timeout or timedelta(minutes=30)
        if launched:
            dist.init_process_group(backend, timeout=wait, device_id=device if cuda else None)
        else:
            # DeepSpeed reads these even for one process, and would look for MPI without them. A store in memory needs
            # no port, so that any number of single-process runs fit on one machine.
            os.environ.update(_ALONE)
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=wait)
    start_watching()
    return Processes(dist.get_rank(), local_rank, dist.get_world_size(), device, owns_group, launched)


def _is_launched() -> bool:
    """Whether a launcher set this process' place in a group."""
    given = [name for name in _COORDINATES if name in os.environ]
    if "RANK" not in given:
        return False
    if len(given) < len(_COORDINATES):
        missing = ", ".join(name for name in _COORDINATES if name not in given)
        raise LaunchError(
            f"RANK is set but {missing} is not: the environment describes half a process group.\n"
            "Start the script with `zero-plugin launch`, with torchrun, or unset RANK to run one process."
        )
    return True
