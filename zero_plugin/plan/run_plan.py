"""The plan of a run from its model, its data and its machines, the same on every process; and what it predicts."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from zero_plugin.config.document import Document
from zero_plugin.config.launch_settings import launch_settings
from zero_plugin.config.resolve.facts import Facts, Precision, Resolved
from zero_plugin.config.resolve.resolve import MICRO_BATCH, resolve, unplanned_micro_batch
from zero_plugin.config.tree import KeyPath
from zero_plugin.distributed.collectives import broadcast_object_list, gather_object
from zero_plugin.distributed.processes import Processes
from zero_plugin.errors import ConfigError
from zero_plugin.machine.device_memory import memory_available_bytes
from zero_plugin.machine.memory import available_cpu_memory
from zero_plugin.plan.activations import trace_activations
from zero_plugin.plan.constants import measure_cluster
from zero_plugin.plan.decoder import decoder_activations, usual_length
from zero_plugin.plan.fields import BY_FORMULA, TRACED, UNKNOWN, Planned, fill_fields, nvme_folder, open_fields
from zero_plugin.plan.footprint import Footprint, footprint
from zero_plugin.plan.live_model import example_inputs, forward_arguments, model_sizes
from zero_plugin.plan.machines import state_cluster
from zero_plugin.plan.options import Stage, running_setup
from zero_plugin.plan.situation import Activations, Affine, Cluster, ModelSizes, OptimizerSizes, Setup, asked_optimizer


def plan_open_fields(
    document: Document, facts: Facts, model: nn.Module, peek: Callable[[], Any], processes: Processes
) -> tuple[Facts, Activations | None]:
    """The facts with what a plan chooses for the fields that only a plan can fill; unchanged where none is open.

    Process 0 makes the plan, for the process that has the least device memory free. Collective where a field is open.
    A micro-batch that alone is open never stops a run, since what the plan takes for a sample is not the loop's.

    Args:
        document: what was asked for.
        facts: of everything else.
        model: the user's module; without an optimizer nothing of it is trained.
        peek: an example of what the loop's batches hold; None where none can be had.
        processes: this process and its peers.

    Returns:
        The facts, and what a forward keeps by that plan; None where no plan was made but of the micro-batch.

    Raises:
        ConfigError: nothing fits, or what is fixed excludes itself.
    """
    if not (asked := open_fields(document.deepspeed, facts)):
        return facts, None
    resolved = resolve(document, replace(facts, complete=False))
    if not (waiting := [path for path in asked if path in resolved.missing]):
        return facts, None  # there is no ZeRO here
    peers = gather_object([(free_bytes(model, processes.device), processes.local_rank == 0)])
    free = min(size for size, _ in peers)
    nodes = max(1, sum(is_first for _, is_first in peers))
    outcome: list[tuple[Planned, Activations | None] | ConfigError | None] = [None]
    if processes.rank == 0:
        try:
            measure = partial(_cluster, document, free, len(peers) // nodes, nodes)
            outcome = [_plan(document, resolved, facts, model, peek(), measure, waiting)]
        except ConfigError as error:
            outcome = [error]
    found = broadcast_object_list(outcome)[0]
    if isinstance(found, ConfigError):
        raise found
    planned, activations = found
    return replace(facts, planned=planned), activations


def _plan(
    document: Document,
    resolved: Resolved,
    facts: Facts,
    model: nn.Module,
    batch: Any,
    measure: Callable[[], Cluster],
    waiting: list[KeyPath],
) -> tuple[Planned, Activations | None]:
    """The values of the fields that wait, and what a forward keeps; None of it where the micro-batch alone waits.

    That one is chosen only where something tells what a sample takes, and is as without a plan where nothing fits.
    """
    alone = waiting == [MICRO_BATCH]
    sizes = model_sizes(model) if alone else _trained_sizes(model, facts)
    guesses = facts.loop.micro_batch is None
    activations, margin = find_activations(model, sizes, batch, resolved.precision, guesses=guesses)
    if alone and not activations.saved.per_sample:
        return {}, None
    try:
        planned = fill_fields(document, resolved, facts, sizes, activations, measure(), margin=margin)
    except ConfigError as error:
        if not alone:
            raise
        asked = (document.deepspeed.value(name) for name in ("train_batch_size", "gradient_accumulation_steps"))
        total, steps = (value if isinstance(value, int) else None for value in asked)
        without, _ = unplanned_micro_batch(total, steps, facts.machine.processes)
        reason = f"{error.problems[0].message.removeprefix('auto, but ')}. {error.problems[0].fix}"
        planned = {MICRO_BATCH: (without, f"as without a plan, by which {reason}")}
    return planned, None if alone else activations


def _trained_sizes(model: nn.Module, facts: Facts) -> ModelSizes:
    """A model's sizes; without an optimizer nothing of it is trained."""
    sizes = model_sizes(model)
    if facts.optimizer is None:
        return replace(sizes, parameters=tuple(replace(p, trainable=False) for p in sizes.parameters))
    return sizes


def find_activations(
    model: nn.Module, sizes: ModelSizes, batch: Any, precision: Precision, *, guesses: bool = False
) -> tuple[Activations, float]:
    """What a forward keeps, and the margin that fits how it is known: traced, by formula, or not at all.

    Args:
        model: the user's module.
        sizes: its own.
        batch: as the loop's are; None where there is none.
        precision: of the computation.
        guesses: whether samples of a usual length stand for the loop's, where the batch tells nothing.
    """
    for example in forward_arguments(model, batch):
        try:
            return trace_activations(model, example, precision), TRACED
        except ConfigError:  # noqa: PERF203 - not the arguments that the loop passes
            continue
    length, why = _sequence_length(batch), ""
    if guesses and not length:
        length, why = usual_length(getattr(model, "config", None)), ", as no DataLoader tells what a sample is"
        with suppress(ConfigError):
            found = trace_activations(model, example_inputs(model, length), precision)
            return replace(found, source=f"{found.source} of inputs from model.config{why}"), TRACED
    if length and sizes.hidden_size and sizes.layers and sizes.vocabulary:
        found = decoder_activations(sizes, length, precision)
        return replace(found, source=f"{found.source}{why}"), BY_FORMULA
    return Activations(Affine(), source=f"unknown, so that {UNKNOWN:.0%} of the memory stay free for them"), UNKNOWN


def _sequence_length(batch: Any) -> int:
    """Tokens of one sample: of the first matrix of integers in the batch; 0 where there is none."""
    leaves = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else [batch]
    matrices = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() == 2)
    return next((leaf.shape[1] for leaf in matrices if not leaf.is_floating_point()), 0)


def _cluster(document: Document, free: int, devices: int, nodes: int) -> Cluster:
    """These machines, with the memory that is free now or stated in the configuration."""
    settings = launch_settings(document)
    here = measure_cluster(devices, nodes, nvme_folder(document.deepspeed))
    if free:
        here = replace(here, device_bytes=free, sources={**here.sources, "device_bytes": "free now"})
    return state_cluster(gpu_memory=settings.gpu_memory, host_memory=settings.host_memory, here=here)


def free_bytes(model: nn.Module, device: torch.device) -> int:
    """What the engine may take of this process' device, with what the model has there already; 0 on a CPU, whose memory
    the processes share."""
    if device.type != "cuda":
        return 0
    own = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters() if p.device == device}
    return memory_available_bytes(device) + sum(own.values())


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
    on_gpu = processes.device.type == "cuda"
    here = local_processes(processes)
    host = available_cpu_memory()
    device = torch.cuda.get_device_properties(processes.device).total_memory if on_gpu else host // here
    return RunMemory(
        _trained_sizes(model, facts),
        activations or Activations(Affine()),
        asked_optimizer(resolved.optimizer, facts.optimizer, on_gpu=on_gpu),
        running_setup(resolved, stage),
        Cluster(device, host, nodes=processes.world_size // here, devices=here),
    )


def local_processes(processes: Processes) -> int:
    """How many processes of the run are on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", processes.world_size))
