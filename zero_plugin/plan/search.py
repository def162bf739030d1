"""Finds the fastest strategy that fits, and what would have to change for others.

Finds the fastest way of training that fits, and says of every other one why not.

What would have to change for a model to fit, and how large a model would fit as things are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from zero_plugin.config.amounts import round_up, show_bytes
from zero_plugin.errors import ConfigError
from zero_plugin.plan.footprint import Footprint, footprint
from zero_plugin.plan.options import Batch, Option, Wanted, batches, options
from zero_plugin.plan.situation import Activations, Affine, Cluster, Highest, ModelSizes, OptimizerSizes, Setup
from zero_plugin.plan.step_time import StepTime, step_time


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way of training, as good as it can be made: the micro-batch (and ratio) by which it is fastest.

    Attributes:
        setup: all its settings.
        footprint: its memory.
        time: of one optimizer step.
        rejected: why it cannot run; "" where it fits. Then the setup is the one of its kind that needs the least.
        short: whether that is because of the memory; otherwise it cannot run whatever there is.
    """

    setup: Setup
    footprint: Footprint
    time: StepTime
    rejected: str = ""
    short: bool = False

    @property
    def seconds_per_sample(self) -> float:
        """Of one process: by which candidates are compared, as their steps may differ in samples."""
        return self.time.seconds / (self.setup.micro_batch * self.setup.accumulation)


@dataclass(frozen=True, slots=True)
class Plan:
    """All candidates, the simpler ones first, and the fastest that fits; None where none does."""

    candidates: tuple[Candidate, ...]
    chosen: Candidate | None


@dataclass(frozen=True, slots=True)
class Situation:
    """What is to be trained, on what, of whose memory the share `margin` stays free."""

    model: ModelSizes
    activations: Activations
    optimizer: OptimizerSizes
    cluster: Cluster
    margin: float

    def measure(self, setup: Setup) -> Footprint:
        """The memory of one way of training on devices that have no more than may be used."""
        usable = replace(self.cluster, device_bytes=int((1 - self.margin) * self.cluster.device_bytes))
        return footprint(self.model, self.activations, self.optimizer, setup, usable)

    def time(self, setup: Setup) -> StepTime:
        """The time of one way of training."""
        return step_time(self.model, self.activations, self.optimizer, setup, self.cluster)

    def shortage(self, needed: Footprint) -> str:
        """What `needed` exceeds, with both numbers; "" where it fits."""
        cluster, found = self.cluster, []
        for need, there, where, terms in (
            (needed.device_bytes, cluster.device_bytes, "on the device", needed.device),
            (needed.host_bytes, cluster.host_bytes, "in host memory", needed.host),
            (needed.nvme_bytes, cluster.nvme_bytes, "on NVMe", needed.nvme),
        ):
            usable = int((1 - self.margin) * there)
            if need > usable:
                most = max(terms, key=lambda name: terms[name])
                found.append(
                    f"{show_bytes(need)} {where}, {show_bytes(usable)} usable; "
                    f"most is {most}, {show_bytes(terms[most])}"
                )
        if cluster.memlock_bytes is not None and needed.locked > cluster.memlock_bytes:
            found.append(f"{show_bytes(needed.locked)} locked, `ulimit -l` allows {show_bytes(cluster.memlock_bytes)}")
        return "; ".join(found)


def search(
    model: ModelSizes, activations: Activations, optimizer: OptimizerSizes, cluster: Cluster, wanted: Wanted
) -> Plan:
    """The fastest setup that keeps what is fixed and fits with the margin.

    Of equally fast ones the simplest: parameters less offloaded, then the optimizer, whole rather than in part, a lower
    stage, no activation checkpointing, the larger micro-batch. The same question always has the same answer.

    Args:
        model: its sizes.
        activations: in the wanted precision.
        optimizer: what it keeps.
        cluster: the machines.
        wanted: the global batch, and whatever else is fixed.

    Raises:
        ConfigError: what is fixed excludes itself.
        ValueError: a speed of the cluster is not known.
    """
    situation = Situation(model, activations, optimizer, cluster, wanted.margin)
    sizes = batches(cluster, wanted)
    lines = options(model, activations, optimizer, cluster, wanted)
    candidates = tuple(_best(situation, option, sizes, wanted) for option in lines)
    fitting = [candidate for candidate in candidates if not candidate.rejected]
    return Plan(candidates, _fastest(fitting) if fitting else None)


def leanest(situation: Situation, wanted: Wanted) -> Iterator[Footprint]:
    """The memory of everything that could run, each with its smallest micro-batch: if none of it fits, nothing does.

    Raises:
        ConfigError: what is fixed excludes itself.
    """
    smallest = batches(situation.cluster, wanted)[-1]
    pins = (True, False) if wanted.pin_memory is None else (wanted.pin_memory,)
    lines = options(situation.model, situation.activations, situation.optimizer, situation.cluster, wanted)
    setups = (setup for option in lines if not option.refused for setup in option.setups)
    for setup in setups:
        for pin in pins if setup.offload_optimizer != "none" else pins[:1]:
            yield situation.measure(replace(_with_batch(setup, smallest), pin_memory=pin))


def _best(situation: Situation, option: Option, sizes: list[Batch], wanted: Wanted) -> Candidate:
    """The fastest of an option's setups that fits; else the one that needs the least, with the reason."""
    setups = [_unpinned_if_needed(situation, _with_batch(setup, sizes[-1]), wanted) for setup in option.setups]
    if option.refused:
        return _candidate(situation, setups[0], option.refused)
    largest = ((setup, _largest_batch(situation, setup, sizes)) for setup in setups)
    fitting = [_candidate(situation, _with_batch(setup, batch)) for setup, batch in largest if batch]
    if fitting:
        return _fastest(fitting)
    return replace(_candidate(situation, setups[0], situation.shortage(situation.measure(setups[0]))), short=True)


def _largest_batch(situation: Situation, setup: Setup, sizes: list[Batch]) -> Batch | None:
    """The first of `sizes`, which fall, that fits: a larger micro-batch is never slower."""

    def fits(batch: Batch) -> bool:
        return not situation.shortage(situation.measure(_with_batch(setup, batch)))

    if sizes[0].accumulation == 1 and fits(sizes[0]):
        return sizes[0]  # apart: a window of one backward carries no gradients into it
    low, high = 0, len(sizes)  # the answer's index lies in [low, high]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(sizes[middle]) else (middle + 1, high)
    return sizes[low] if low < len(sizes) else None


def _unpinned_if_needed(situation: Situation, setup: Setup, wanted: Wanted) -> Setup:
    """Without page-locked memory where host memory is short: torch rounds each locked tensor up to a power of two."""
    if wanted.pin_memory is not None or situation.measure(setup).host_bytes <= (
        (1 - situation.margin) * situation.cluster.host_bytes
    ):
        return setup
    return replace(setup, pin_memory=False)


def _candidate(situation: Situation, setup: Setup, rejected: str = "") -> Candidate:
    return Candidate(setup, situation.measure(setup), situation.time(setup), rejected)


def _with_batch(setup: Setup, batch: Batch) -> Setup:
    return replace(setup, micro_batch=batch.micro_batch, accumulation=batch.accumulation)


def _fastest(candidates: Iterable[Candidate]) -> Candidate:
    return min(candidates, key=lambda c: (float(f"{c.seconds_per_sample:.9g}"), *_complexity(c.setup)))


def _complexity(setup: Setup) -> tuple[float, ...]:
    """How far a setup is from plain training."""
    rank = {"none": 0, "cpu": 1, "nvme": 2}
    stage = 0 if setup.stage is None else setup.stage + 0.5
    part = 0.0 if setup.ratio == 1.0 else setup.ratio
    return (
        rank[setup.offload_param],
        rank[setup.offload_optimizer],
        part,
        stage,
        setup.activation_checkpointing,
        -setup.micro_batch,
    )


# What stays as the user has it: another batch or number type trains another model.
_KEPT: Final = ("ddp", "precision", "gradient_bytes", "global_batch", "margin")
_MOST_NODES: Final = 1024
_MOST_ELEMENTS: Final = 10**14
_PLENTY: Final = 2**60  # bytes
_MEMORIES: Final = {"host_bytes": "in host memory", "nvme_bytes": "of NVMe disk", "device_bytes": "on each device"}


@dataclass(frozen=True, slots=True)
class Change:
    """One change by which the model fits.

    Attributes:
        what: in words, e.g. "31.2 GiB on each device instead of 24 GiB".
        chosen: the fastest way of training then.
        cluster: the machines then.
    """

    what: str
    chosen: Candidate
    cluster: Cluster


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Answers to two questions.

    Attributes:
        changes: where nothing fits: each suffices alone, the cheapest first: settings, then host memory, disk, device
            memory, machines. Empty where something fits.
        largest_elements: parameters of the largest model of the same shape that fits; 0 where none does.
    """

    changes: tuple[Change, ...]
    largest_elements: int


def what_if(
    model: ModelSizes, activations: Activations, optimizer: OptimizerSizes, cluster: Cluster, wanted: Wanted
) -> WhatIf:
    """The nearest configurations that fit, each with one thing changed, and the largest model that fits.

    Args:
        model: its sizes.
        activations: in the wanted precision.
        optimizer: what it keeps.
        cluster: the machines.
        wanted: what is fixed.

    Raises:
        ConfigError: what is fixed excludes itself.
    """
    situation = Situation(model, activations, optimizer, cluster, wanted.margin)
    changes = () if _fits(situation, wanted) else tuple(_changes(situation, wanted))
    return WhatIf(changes, _largest(situation, wanted))


def scale_model(model: ModelSizes, activations: Activations, factor: float) -> tuple[ModelSizes, Activations]:
    """A model with `factor` times the parameters, grown evenly in width and depth as decoders are.

    Depth and width both grow by the factor's cube root (parameters are depth × width²), so activations, which are
    depth × width, grow by its square; operations grow as the parameters do.
    """
    area, width = factor ** (2 / 3), factor ** (1 / 3)

    def line(amount: Affine) -> Affine:
        return Affine(int(amount.fixed * factor), int(amount.per_sample * area))

    def grown(amount: Affine | Highest | None) -> Affine | Highest | None:
        return Highest(tuple(map(line, amount.lines))) if isinstance(amount, Highest) else amount and line(amount)

    def scaled(of: Activations) -> Activations:
        return replace(
            of,
            saved=line(of.saved),
            transient=grown(of.transient) or Affine(),
            checkpointed=of.checkpointed and line(of.checkpointed),
            checkpointed_transient=grown(of.checkpointed_transient),
            checkpointed_forward=grown(of.checkpointed_forward),
            flops_per_sample=of.flops_per_sample * factor,
            autocast=None if of.autocast is None else scaled(of.autocast),
        )

    larger = replace(
        model,
        parameters=tuple(replace(p, elements=max(1, round(p.elements * factor))) for p in model.parameters),
        buffer_bytes=int(model.buffer_bytes * factor),
        largest_module=round(model.largest_module * factor),
        hidden_size=None if model.hidden_size is None else round(model.hidden_size * width),
    )
    return larger, scaled(activations)


def _changes(situation: Situation, wanted: Wanted) -> Iterator[Change]:
    for field in fields(Wanted):
        value = getattr(wanted, field.name)
        if field.name not in _KEPT and value is not None:
            freed: dict[str, Any] = {field.name: None}
            yield from _tried(situation, replace(wanted, **freed), f"{field.name} free instead of {value}")
    if not wanted.ddp and wanted.stage is None:
        yield from _tried(situation, replace(wanted, ddp=True), "training without ZeRO")
    if wanted.stage == "ddp" and not wanted.gradient_views:
        views = "DistributedDataParallelKwargs(gradient_as_bucket_view=True), for gradients without a copy"
        yield from _tried(situation, replace(wanted, gradient_views=True), views)
    cluster = situation.cluster
    for name, where in _MEMORIES.items():
        least = _least(situation, wanted, name)
        if least is not None:
            instead = show_bytes(getattr(cluster, name)) if getattr(cluster, name) else "none"
            there = _with_memory(situation, name, least)
            yield from _tried(there, wanted, f"{show_bytes(least)} {where} instead of {instead}")
    nodes = 2 * cluster.nodes
    while nodes <= _MOST_NODES:
        more = replace(situation, cluster=replace(cluster, nodes=nodes))
        found = tuple(_tried(more, wanted, f"{nodes} nodes instead of {cluster.nodes}"))
        if found:
            yield from found
            return
        nodes *= 2


def _tried(situation: Situation, wanted: Wanted, what: str) -> Iterator[Change]:
    """The change, if something fits by it."""
    try:
        if not _fits(situation, wanted):
            return
        plan = search(situation.model, situation.activations, situation.optimizer, situation.cluster, wanted)
    except ConfigError:  # the batch cannot be divided so
        return
    if plan.chosen is not None:
        yield Change(what, plan.chosen, situation.cluster)


def _least(situation: Situation, wanted: Wanted, name: str) -> int | None:
    """The least of one kind of memory by which something fits, as it is shown; None where no amount of it suffices."""
    roomy = _with_memory(situation, name, _PLENTY)
    # On a device without room DeepSpeed makes its flat copy in host memory.
    needed = leanest(_with_memory(situation, name, 1) if name == "device_bytes" else roomy, wanted)
    fitting = (found for found in needed if not roomy.shortage(found))
    least = min((int(getattr(found, name) / (1 - wanted.margin)) + 1 for found in fitting), default=None)
    return least and round_up(least)


def _with_memory(situation: Situation, name: str, size: int) -> Situation:
    changed: dict[str, Any] = {name: size}
    return replace(situation, cluster=replace(situation.cluster, **changed))


def _fits(situation: Situation, wanted: Wanted) -> bool:
    return any(not situation.shortage(found) for found in leanest(situation, wanted))


def _largest(situation: Situation, wanted: Wanted) -> int:
    """By halving the interval in which the factor lies, to a thousandth."""

    def fits(factor: float) -> bool:
        model, activations = scale_model(situation.model, situation.activations, factor)
        return _fits(replace(situation, model=model, activations=activations), wanted)

    if not situation.model.elements:
        return 0
    low, high = 1 / situation.model.elements, _MOST_ELEMENTS / situation.model.elements
    if not fits(low):
        return 0
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if fits(middle) else (low, middle)
    return int(low * situation.model.elements)
