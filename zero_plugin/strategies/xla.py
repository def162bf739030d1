"""Data parallelism over TPU devices through torch_xla: a whole copy of the model in every replica."""

from __future__ import annotations

import importlib
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zero_plugin import collectives
from zero_plugin.accumulation import AccumulationWindow
from zero_plugin.distributed_type import DistributedType
from zero_plugin.errors import LoopError
from zero_plugin.plugins import AutocastKwargs
from zero_plugin.strategies.autocast import autocast_as
from zero_plugin.strategies.base import Session, SessionRequest, Strategy
from zero_plugin.strategies.lone import LoneOptimizer
from zero_plugin.strategies.processes import Processes
from zero_plugin.strategies.torch_session import TorchSession, keep_weights_in_fp32, torch_optimizer, torch_session
from zero_plugin.strategies.xla_runtime import check_world_size, import_torch_xla, refuse_threads, start_runtime

__all__ = ["Replica", "XlaStrategy", "find_replica"]


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

        Where the launcher named no meeting point, it is that of torch_xla's own process groups.
        """
        if self.world_size == 1:
            return {}
        runtime = importlib.import_module("torch_xla.runtime")
        address = os.environ.get("MASTER_ADDR")
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": address or (runtime.get_master_ip() if runtime.device_type() == "TPU" else "localhost"),
            "MASTER_PORT": os.environ.get("MASTER_PORT", "12355"),
        }


def find_replica() -> Replica:
    """This process' place, as the XLA runtime has it, which is started.

    Raises:
        LaunchError: the runtime has no TPU, connects fewer processes than were started, or runs several in threads.
        MachineError: torch_xla or the runtime does not work here.
    """
    torch_xla = import_torch_xla()
    start_runtime()
    runtime = importlib.import_module("torch_xla.runtime")
    check_world_size(runtime.world_size())
    refuse_threads(runtime.world_size())
    if runtime.world_size() == 1:
        return Replica(0, 0, 1, 1, torch_xla.device())
    return Replica(
        runtime.global_ordinal(),
        runtime.local_ordinal(),
        runtime.world_size(),
        runtime.local_device_count(),
        torch_xla.device(),
    )


class XlaStrategy(Strategy):
    """Replicas on XLA devices, whose gradients are averaged by one all-reduce where a window of accumulation ends."""

    name = "xla"
    distributed_type = DistributedType.XLA
    optimizer_may_follow = True

    def __init__(self, processes: Processes) -> None:
        self._processes = processes

    def refuse(self) -> str | None:
        """See `Strategy.refuse`."""
        device = self._processes.device.type
        return None if device == "xla" else f"this run computes on {device}"

    def build_session(self, request: SessionRequest, processes: Processes) -> Session:
        """See `Strategy.build_session`."""
        keep_weights_in_fp32(request)
        module = request.model
        _take_from_first(module)
        if request.is_placed:
            _move(module, processes.device)
        elif any(p.device.type != "xla" for p in module.parameters()):
            raise LoopError(
                f"prepare() got a {type(module).__name__} that is to stay where it is, and that is not the XLA "
                "device.\nLeave device_placement out, or call .to(accelerator.device) before its optimizer is made."
            )
        recorder = _Recorder(processes)
        recorder.follow_inference(module)
        return torch_session(module, request, torch_optimizer(request), self.handlers, recorder)

    def autocast(self, precision: str, handler: AutocastKwargs | None) -> AbstractContextManager[Any]:
        """See `Strategy.autocast`."""
        return autocast_as(precision, "xla", handler)

    def add_optimizer(self, session: Session, request: SessionRequest) -> None:
        """See `Strategy.add_optimizer`."""
        keep_weights_in_fp32(request)
        optimizer = torch_optimizer(request)
        assert isinstance(session, TorchSession)
        assert optimizer is not None, "the request is for one"
        session.train_with(optimizer)

    def hold_optimizer(self, optimizer: Optimizer, window: AccumulationWindow) -> LoneOptimizer:
        """See `Strategy.hold_optimizer`."""
        return LoneOptimizer(optimizer, window, steps=self._processes.world_size == 1)


class _Recorder:
    """See `Recorder`: torch_xla notes operations down as a graph, which it compiles once and runs at a `sync`."""

    def __init__(self, processes: Processes) -> None:
        self._replicas = processes.world_size
        self._sync = importlib.import_module("torch_xla").sync
        self._model = importlib.import_module("torch_xla.core.xla_model")

    def end_backward(self, module: nn.Module, *, averages: bool) -> None:
        """See `Recorder.end_backward`.

        What does not end a window is run, so that the graph of a step is the same however many backwards came before.
        """
        if not averages:
            self._sync()
        elif self._replicas > 1:
            gradients = [p.grad for p in module.parameters() if p.grad is not None]
            self._model.all_reduce(self._model.REDUCE_SUM, gradients, scale=1.0 / self._replicas)

    def run(self) -> None:
        """See `Recorder.run`."""
        self._sync()

    def follow_inference(self, module: nn.Module) -> None:
        """Run what is noted down before each forward that trains nothing: else a whole evaluation is one graph."""

        def run_before(*_: Any) -> None:
            if not torch.is_grad_enabled():
                self._sync()

        module.register_forward_pre_hook(run_before)


def _take_from_first(module: nn.Module) -> None:
    """Give parameters and buffers the values of process 0, as DDP does; collective."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.copy_(collectives.broadcast(tensor))


def _move(module: nn.Module, device: torch.device) -> None:
    """Move a module that its optimizer, and ties between its layers, go on knowing by the same objects.

    `module.to` makes new parameters where the device is of another kind.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device == device:
            continue
        moved: torch.Tensor = tensor.detach().to(device)
        if isinstance(tensor, nn.Parameter):
            moved = nn.Parameter(moved, requires_grad=tensor.requires_grad)
        moved.__dict__.update(tensor.__dict__)
        torch.utils.swap_tensors(tensor, moved)  # type: ignore[no-untyped-call]
