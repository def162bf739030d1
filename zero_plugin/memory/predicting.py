"""What a run takes by the plan's arithmetic."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from zero_plugin.meter import memory_available_bytes
from zero_plugin.plan.footprint import Footprint, footprint
from zero_plugin.plan.optimizers import asked_optimizer
from zero_plugin.plan.running import Stage, running_setup
from zero_plugin.plan.situation import Activations, Affine, Cluster, ModelSizes, OptimizerSizes, Setup
from zero_plugin.probe.sizes import model_sizes
from zero_plugin.resolve.facts import Facts
from zero_plugin.resolve.resolved import Resolved
from zero_plugin.strategies.processes import Processes

__all__ = ["RunMemory", "local_processes", "predict_memory"]


@dataclass(frozen=True)
class RunMemory:
    """What the memory of a run is computed from; see `footprint`."""

    sizes: ModelSizes
    activations: Activations
    optimizer: OptimizerSizes
    setup: Setup
    cluster: Cluster

    @cached_property
    def footprint(self) -> Footprint:
        """On one process' device, on its machine and on its NVMe drive."""
        return footprint(self.sizes, self.activations, self.optimizer, self.setup, self.cluster)

    def changed(self, **fields: Any) -> RunMemory:
        """The same with other `fields` of its setup."""
        return replace(self, setup=replace(self.setup, **fields))


def predict_memory(
    model: nn.Module,
    resolved: Resolved,
    stage: Stage,
    facts: Facts,
    processes: Processes,
    activations: Activations | None = None,
) -> RunMemory:
    """The memory of a run.

    Args:
        model: the user's module, not prepared yet.
        resolved: its configuration.
        stage: of ZeRO that it runs; None without.
        facts: it was resolved from.
        processes: this process and its peers.
        activations: what a forward keeps; None leaves them out.
    """
    sizes = model_sizes(model)
    if facts.optimizer is None:
        sizes = replace(sizes, parameters=tuple(replace(p, trainable=False) for p in sizes.parameters))
    on_gpu = processes.device.type == "cuda"
    here = local_processes(processes)
    host = memory_available_bytes(torch.device("cpu")) or 0
    device = torch.cuda.get_device_properties(processes.device).total_memory if on_gpu else host // here
    return RunMemory(
        sizes,
        activations or Activations(Affine()),
        asked_optimizer(resolved.optimizer, facts.optimizer, on_gpu=on_gpu),
        running_setup(resolved, stage),
        Cluster(device, host, nodes=processes.world_size // here, devices=here),
    )


def local_processes(processes: Processes) -> int:
    """How many processes of the run are on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", processes.world_size))
