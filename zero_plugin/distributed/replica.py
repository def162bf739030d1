"""This process among those that the XLA runtime connects, and the device that it computes on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

import torch

from zero_plugin.errors import LaunchError
from zero_plugin.machine.network import OWN_ADDRESS
from zero_plugin.machine.xla_runtime import check_world_size, import_torch_xla, refuse_threads, start_runtime

_ASSERTION: Final = "device_ready_queues_"  # in torch/csrc/autograd/engine.cpp, of a device that came late


@dataclass(frozen=True, slots=True)
class Replica:
    """This process among those that the XLA runtime connects.

    Attributes:
        rank, local_rank: index among all, and on this machine.
        world_size, local_size: number of all, and of this machine's.
        device: the XLA device.
    """

    rank: int
    local_rank: int
    world_size: int
    local_size: int
    device: torch.device

    def describe_group(self) -> dict[str, str]:
        """The variables that describe a process group of these replicas; none for one replica.

        Where the launcher named no meeting point, it is that of torch_xla's own process groups. What a launcher that
        knows its own machine alone has set of one is taken out of the environment.
        """
        if self.world_size == 1:
            return {}
        if self.world_size > self.local_size and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):  # each machine has its own
                os.environ.pop(name, None)
        runtime = import_torch_xla().runtime
        address = os.environ.get("MASTER_ADDR")
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": address or (runtime.get_master_ip() if runtime.device_type() == "TPU" else OWN_ADDRESS),
            "MASTER_PORT": os.environ.get("MASTER_PORT", "12355"),
        }


def find_replica() -> Replica:
    """Start the XLA runtime, and find this process' place in it.

    Raises:
        LaunchError: the runtime has no TPU, connects fewer processes than were started, or runs several in threads; or
            this process has run a `backward` before.
        MachineError: torch_xla or the runtime does not work here.
    """
    start_runtime()  # first, since an import of torch_xla says PJRT_DEVICE where nobody has
    torch_xla = import_torch_xla()
    runtime = torch_xla.runtime
    world_size = runtime.world_size()
    check_world_size(world_size)
    refuse_threads(world_size)
    torch_xla.manual_seed(torch.initial_seed())  # what `set_seed` before could not reach
    device = torch_xla.device()
    _refuse_late_start(device)
    if world_size == 1:
        return Replica(0, 0, 1, 1, device)
    return Replica(runtime.global_ordinal(), runtime.local_ordinal(), world_size, runtime.local_device_count(), device)


def _refuse_late_start(device: torch.device) -> None:
    try:
        torch.zeros((), device=device, requires_grad=True).backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if _ASSERTION not in str(error):
            raise  # of the compiler, or for want of memory
        raise LaunchError(
            "a backward() ran before the XLA runtime was started: torch's autograd engine counted the devices then, "
            "and does not serve this one.\nMake the Accelerator, or PartialState(), before the first backward()."
        ) from error
