"""Plain data parallelism: a whole copy of the model in every process."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from zero_plugin.strategies.base import Session, SessionRequest, Strategy
from zero_plugin.strategies.experts import find_expert_layers, reach_every_expert
from zero_plugin.strategies.processes import Processes
from zero_plugin.strategies.torch_session import keep_weights_in_fp32, torch_optimizer, torch_session

__all__ = ["DdpStrategy"]


class DdpStrategy(Strategy):
    """DistributedDataParallel over NCCL on GPUs, gloo on CPUs."""

    name = "ddp"

    def __init__(self, processes: Processes) -> None:
        self._processes = processes

    def refuse(self) -> str | None:
        """See `Strategy.refuse`."""
        return "only one process runs" if self._processes.world_size == 1 else None

    def build_session(self, request: SessionRequest, processes: Processes) -> Session:
        """See `Strategy.build_session`."""
        keep_weights_in_fp32(request)
        module = request.model.to(processes.device)
        for layer in find_expert_layers(module, ()):
            reach_every_expert(layer, with_gradients=True)
        optimizer = torch_optimizer(request)
        trains = optimizer is not None and any(p.requires_grad for p in module.parameters())
        model = (
            DistributedDataParallel(
                module,
                device_ids=[processes.device] if processes.device.type == "cuda" else None,
                # Gradients are views into the buckets: no second copy of them, and none to make each step.
                gradient_as_bucket_view=True,
            )
            if trains
            else module
        )
        return torch_session(model, request, optimizer)
