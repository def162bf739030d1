"""Finds the fastest way of training that fits, and says of every other one why not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from zero_plugin.plan.amounts import show_gib
from zero_plugin.plan.footprint import Footprint, footprint
from zero_plugin.plan.options import Batch, Option, Wanted, batches, options
from zero_plugin.plan.situation import Activations, Cluster, ModelSizes, OptimizerSizes, Setup
from zero_plugin.plan.step_time import StepTime, step_time

__all__ = ["Candidate", "Plan", "Situation", "leanest", "search"]


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
                    f"{show_gib(need)} {where}, {show_gib(usable)} usable; most is {most}, {show_gib(terms[most])}"
                )
        if cluster.memlock_bytes is not None and needed.locked > cluster.memlock_bytes:
            found.append(f"{show_gib(needed.locked)} locked, `ulimit -l` allows {show_gib(cluster.memlock_bytes)}")
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
