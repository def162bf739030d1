"""Finds the fastest strategy that fits, and the reason why each of the others does not."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from zero_plugin.config.amounts import show_bytes
from zero_plugin.config.resolve.facts import ModelFacts, Precision
from zero_plugin.config.resolve.resolve import choose_bucket, choose_persistence_threshold
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.plan.costs import Footprint, ProcessMemory, StepTime, footprint, step_time
from zero_plugin.plan.situation import Cluster, Device, ModelSizes, Setup, Stage, Workload, budget, name_setup

# Without a global batch, micro-batches are powers of two up to this.
_LARGEST_MICRO_BATCH: Final = 4096
_RATIOS: Final = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
_GROUPS: Final = 20  # sub-groups per process, so a tenth of them is at least one
# Optimizer and parameters. The states are eight times as large as the weights, so weights are offloaded only after the
# states.
_OFFLOADS: Final[tuple[tuple[Device, Device], ...]] = (
    ("none", "none"),
    ("cpu", "none"),
    ("cpu", "cpu"),
    ("nvme", "none"),
    ("nvme", "cpu"),
    ("nvme", "nvme"),
)
# Strategies whose step times differ by less than this fraction count as equally fast, since a roofline is not more
# accurate. The simplest one is taken.
ALIKE: Final = 0.03
_GRADIENT_BYTES: Final[dict[Precision, int]] = {"no": 4, "bf16": 4, "fp16": 2}  # as resolution chooses


@dataclass(frozen=True, slots=True)
class Wanted:
    """The settings that the user has fixed; None is free. The fields are those of `Setup`, and:

    Attributes:
        stage: `ddp` is training without ZeRO. Free, the search tries `ddp` and stages 1 to 3.
        ddp: whether a free stage may be training without ZeRO. Otherwise DeepSpeed's stage 0 replaces it, if it sums
            gradients as the other stages do: in bf16, stage 0 has no sums in fp32.
        overlap_comm: free, stage 3 overlaps, and stage 2 does if that is faster.
        global_batch: samples per optimizer step, on all processes together. Free, the micro-batch is the largest power
            of two that fits, and setups are compared by their time per sample.
        every_batch: whether a free micro-batch may be any number instead of only a power of two.
        margin: the fraction of device memory, CPU memory and disk that stays free, since predicted peaks are accurate
            within 10 %.
    """

    stage: Literal["ddp", 0, 1, 2, 3] | None = None
    ddp: bool = True
    precision: Precision = "bf16"
    gradient_bytes: int | None = None
    offload_optimizer: Device | None = None
    offload_param: Device | None = None
    ratio: float | None = None
    sub_group_size: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    activation_checkpointing: bool | None = None
    reduce_bucket: int | None = None
    prefetch_bucket: int | None = None
    persistence_threshold: int | None = None
    max_live_parameters: int | None = None
    max_reuse_distance: int | None = None
    param_buffer: int | None = None
    overlap_comm: bool | None = None
    pin_memory: bool | None = None
    gradient_views: bool | None = None
    global_batch: int | None = None
    every_batch: bool = False
    margin: float = 0.1


@dataclass(frozen=True, slots=True)
class Option:
    """One line of a plan: setups that differ only in `ratio` or `overlap_comm`, and in the batch that each then gets.

    Attributes:
        setups: from the least memory on the device to the most.
        refused: why this cannot run whatever the memory; "" if it can.
    """

    setups: tuple[Setup, ...]
    refused: str = ""


def options(work: Workload, cluster: Cluster, wanted: Wanted) -> Iterator[Option]:
    """Yield all options, the simpler ones first: less offload, a lower stage, no checkpointing.

    Raises:
        ConfigError: the fixed stage and offloads exclude each other.
    """
    base = _base(work.model, wanted)
    checkpointing = (False, True) if work.activations.checkpointed is not None else (False,)
    if wanted.activation_checkpointing is not None:
        checkpointing = (wanted.activation_checkpointing,)
    found = False
    for offloads in _offloads(wanted):
        for stage in _stages(wanted, offloads):
            found = True
            overlap = stage == 3 if wanted.overlap_comm is None else wanted.overlap_comm and (stage or 0) >= 2
            setup = replace(
                base, stage=stage, offload_optimizer=offloads[0], offload_param=offloads[1], overlap_comm=overlap
            )
            for recomputed in checkpointing:
                yield from _ratios(replace(setup, activation_checkpointing=recomputed), work, cluster, wanted)
    if not found:
        parts = {"stage": wanted.stage, "optimizer to": wanted.offload_optimizer, "parameters to": wanted.offload_param}
        asked = ", ".join(f"{name} {'auto' if value is None else value}" for name, value in parts.items())
        fix = "The optimizer goes to cpu from stage 1 up; parameters, and anything on nvme, need stage 3."
        if wanted.ratio not in (None, 1.0):
            asked += f", ratio {wanted.ratio:g}"
            fix += " A ratio below 1 needs stage 3, and the optimizer on cpu."
        raise ConfigError([Problem("plan", "zero_optimization", f"no such strategy: {asked}", fix)])


def batches(cluster: Cluster, wanted: Wanted) -> list[dict[str, Any]]:
    """Return the `micro_batch` and `accumulation` that give the global batch, the largest micro-batch first.

    Raises:
        ConfigError: none do.
    """
    processes, micro, accumulation = cluster.groups, wanted.micro_batch, wanted.accumulation
    if wanted.global_batch is None:
        sizes = list(range(_LARGEST_MICRO_BATCH, 0, -1)) if micro is None else [micro]
        if micro is None and not wanted.every_batch:
            sizes = [_LARGEST_MICRO_BATCH >> power for power in range(_LARGEST_MICRO_BATCH.bit_length())]
        return [{"micro_batch": size, "accumulation": accumulation or 1} for size in sizes]
    share, rest = divmod(wanted.global_batch, processes)
    sizes = [size for size in range(share, 0, -1) if share % size == 0] if not rest else []
    pairs = [(size, share // size) for size in sizes]
    pairs = [pair for pair in pairs if micro in (None, pair[0]) and accumulation in (None, pair[1])]
    if not pairs:
        parts = {"micro-batch": micro, "accumulation": accumulation, "processes": processes}
        product = " × ".join(f"{name} {number}" for name, number in parts.items() if number is not None)
        message = f"{wanted.global_batch} is no multiple of {product}"
        if micro and accumulation:
            message = f"{wanted.global_batch} is not {product}"
        raise ConfigError([Problem("plan", "train_batch_size", message, "Change one of them.")])
    return [{"micro_batch": size, "accumulation": steps} for size, steps in pairs]


def _base(model: ModelSizes, wanted: Wanted) -> Setup:
    """Return the setup that all lines share, with the bucket sizes that resolution will choose."""
    largest = max((p.elements for p in model.parameters), default=0)
    facts = ModelFacts(model.hidden_size, "", largest, model.elements)
    chosen = {
        "reduce_bucket": choose_bucket(facts),
        "prefetch_bucket": choose_bucket(facts, 0.9),
        "persistence_threshold": choose_persistence_threshold(facts),
    }
    sizes = {name: found[0] for name, found in chosen.items() if found is not None and found[0] is not None}
    sizes["param_buffer"] = max(Setup().param_buffer, largest)
    names = ("max_live_parameters", "max_reuse_distance", "param_buffer", "pin_memory", "gradient_views", *chosen)
    fixed = {name: getattr(wanted, name) for name in names if getattr(wanted, name) is not None}
    gradient_bytes = wanted.gradient_bytes or _GRADIENT_BYTES[wanted.precision]
    return replace(Setup(precision=wanted.precision, gradient_bytes=gradient_bytes), **(sizes | fixed))


def _offloads(wanted: Wanted) -> Iterator[tuple[Device, Device]]:
    asked = (wanted.offload_optimizer, wanted.offload_param)
    if asked[0] is not None and asked[1] is not None:
        yield asked[0], asked[1]
        return
    in_part = wanted.ratio not in (None, 1.0)
    for pair in _OFFLOADS:
        if in_part and pair[0] == "nvme":
            continue
        if all(wish in (None, device) for wish, device in zip(asked, pair, strict=True)):
            yield pair


def _stages(wanted: Wanted, offloads: tuple[Device, Device]) -> Iterator[Stage]:
    if wanted.stage is not None:
        asked: list[Stage] = [None if wanted.stage == "ddp" else wanted.stage]
    else:
        sums_alike = wanted.precision != "bf16" or wanted.accumulation == 1 or wanted.gradient_bytes == 2
        asked = [None, 1, 2, 3] if wanted.ddp else [0, 1, 2, 3] if sums_alike else [1, 2, 3]
    needs_three = offloads[1] != "none" or "nvme" in offloads or wanted.ratio not in (None, 1.0)
    lowest = 3 if needs_three else 1 if offloads[0] == "cpu" else 0
    yield from (stage for stage in asked if (stage or 0) >= lowest)


def _ratios(setup: Setup, work: Workload, cluster: Cluster, wanted: Wanted) -> Iterator[Option]:
    """Yield options with the optimizer offloaded completely and in part; at stage 2, without and with `overlap_comm`.

    Stage 3 updates one sub-group at a time. Small sub-groups therefore need less memory in addition to the states, and
    smaller buffers for a disk. Only a process with several sub-groups can offload a part of them.
    """
    refused = ""
    if "nvme" in (setup.offload_optimizer, setup.offload_param) and not cluster.nvme_bytes:
        refused = "no NVMe disk is stated"
    if setup.stage == 3:
        own = work.model.trainable // cluster.processes
        size = wanted.sub_group_size or min(setup.sub_group_size, max(1, own // _GROUPS))
        setup = replace(setup, sub_group_size=size)
    tries_overlap = setup.stage == 2 and wanted.overlap_comm is None and cluster.processes > 1
    in_part = setup.stage == 3 and setup.offload_optimizer == "cpu" and wanted.ratio != 1.0
    if wanted.ratio is None or not in_part:
        yield Option((setup, replace(setup, overlap_comm=True)) if tries_overlap else (setup,), refused)
    if not in_part:
        return
    parts = [replace(setup, ratio=ratio) for ratio in (_RATIOS if wanted.ratio is None else (wanted.ratio,))]
    if wanted.ratio is None:
        memories = (ProcessMemory(work.model, work.optimizer, part, cluster.processes) for part in parts)
        parts = [memory.setup for memory in memories if memory.updated_on_device]
    if parts:
        if not refused and work.optimizer.name not in ("adam", "adamw"):
            refused = "only DeepSpeed's own Adam can update on CPU and device together"
        yield Option(tuple(parts), refused)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One strategy with the micro-batch (and ratio, and overlap) that makes it fastest.

    Attributes:
        setup: all its settings.
        footprint: its memory.
        time: of one optimizer step.
        rejected: why it cannot run; "" if it fits. A rejected setup is the one of its kind that needs the least memory.
        short: whether it was rejected for lack of memory; otherwise it cannot run whatever the memory.
    """

    setup: Setup
    footprint: Footprint
    time: StepTime
    rejected: str = ""
    short: bool = False

    @property
    def seconds_per_sample(self) -> float:
        """Seconds per sample of one process. The search compares these, since steps may differ in samples."""
        return self.time.seconds / (self.setup.micro_batch * self.setup.accumulation)


@dataclass(frozen=True, slots=True)
class Choice:
    """The fastest setup that fits, the reasons for it, and the candidates it was compared with.

    Attributes:
        table: all candidates, the simpler ones first.
        chosen: the setup to train with; None if none fits.
        reasons: the reason for each field of the chosen setup.
        why_not: if none fits, the closest candidate and the memory that it lacks.
    """

    table: tuple[Candidate, ...]
    chosen: Candidate | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)
    why_not: str = ""


# See `grad_partitions_flat_buffer` of DeepSpeed's stage 3.
_OF_ALL: Final = ", of all parameters, which DeepSpeed 0.19.8 keeps there and never on NVMe"


@dataclass(frozen=True, slots=True)
class Question:
    """The training, the machines, and the fixed settings."""

    work: Workload
    cluster: Cluster
    wanted: Wanted

    def measure(self, setup: Setup) -> Footprint:
        """Return the memory of one setup on devices that have only the usable memory."""
        cluster = replace(self.cluster, device_bytes=budget(self.cluster.device_bytes, self.wanted.margin))
        return footprint(self.work, setup, cluster)

    def candidate(self, setup: Setup, rejected: str = "", *, short: bool = False) -> Candidate:
        """Return a line of the table."""
        return Candidate(setup, self.measure(setup), step_time(self.work, setup, self.cluster), rejected, short)

    def missing_memory(self, needed: Footprint) -> str:
        """Return how `needed` exceeds the budgets, with both numbers; "" if it fits."""
        cluster, found = self.cluster, []
        for need, there, where, terms in (
            (needed.device_bytes, cluster.device_bytes, "on the device", needed.device),
            (needed.host_bytes, cluster.host_bytes, "in CPU memory", needed.host),
            (needed.nvme_bytes, cluster.nvme_bytes, "on NVMe", needed.nvme),
        ):
            if need > budget(there, self.wanted.margin):
                most = max(terms, key=lambda name: terms[name])
                found.append(
                    f"{show_bytes(need)} {where}, budget {show_bytes(budget(there, self.wanted.margin))}; "
                    f"mostly {most}, {show_bytes(terms[most])}"
                    + (_OF_ALL if most == "gradients" and needed.nvme and terms is needed.host else "")
                )
        if cluster.memlock_bytes is not None and needed.locked > cluster.memlock_bytes:
            found.append(
                f"{show_bytes(needed.locked)} locked, but `ulimit -l` allows {show_bytes(cluster.memlock_bytes)}"
            )
        return "; ".join(found)

    def excess(self, candidate: Candidate) -> float:
        """Return the candidate's `Footprint.excess`."""
        return candidate.footprint.excess(self.cluster)


def plan(work: Workload, cluster: Cluster, wanted: Wanted) -> Choice:
    """Return the fastest setup that keeps the fixed settings and fits with the margin.

    Setups within `ALIKE` of the fastest count as equally fast. Of these, the simplest is taken: parameters less
    offloaded, then the optimizer, all of it rather than a part, a lower stage, no activation checkpointing, no overlap
    at stage 2, the larger micro-batch. The same question always has the same answer.

    Args:
        work: the training, in the wanted precision.
        cluster: the machines.
        wanted: the global batch, and all other fixed settings.

    Raises:
        ConfigError: the fixed settings contradict each other.
        ValueError: a speed of the cluster is not known.
    """
    question = Question(work, cluster, wanted)
    sizes = batches(cluster, wanted)
    table = tuple(_best(question, option, sizes) for option in options(work, cluster, wanted))
    fitting = [candidate for candidate in table if not candidate.rejected]
    if fitting:
        chosen = _fastest(fitting)
        return Choice(table, chosen, _reasons(question, table, chosen))
    least = min([c for c in table if c.short] or table, key=question.excess)
    return Choice(table, why_not=f"{name_setup(least.setup)} needs {least.rejected} ({work.activations.knowledge})")


def _best(question: Question, option: Option, sizes: list[dict[str, Any]]) -> Candidate:
    """Return an option's fastest setup that fits; otherwise the one that needs the least, with the reason."""
    setups = [_unpinned_if_needed(question, replace(setup, **sizes[-1])) for setup in option.setups]
    if option.refused:
        return question.candidate(setups[0], option.refused)
    largest = ((setup, _largest_batch(question, setup, sizes)) for setup in setups)
    fitting = [question.candidate(replace(setup, **batch)) for setup, batch in largest if batch]
    if fitting:
        return _fastest(fitting, alike=0.0)
    return question.candidate(setups[0], question.missing_memory(question.measure(setups[0])), short=True)


def _largest_batch(question: Question, setup: Setup, sizes: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the first of the falling `sizes` that fits: a larger micro-batch is never slower."""

    def fits(batch: dict[str, Any]) -> bool:
        return not question.missing_memory(question.measure(replace(setup, **batch)))

    if sizes[0]["accumulation"] == 1 and fits(sizes[0]):
        return sizes[0]  # a separate check, as a window of one backward carries no gradients
    first = bisect_left(sizes, True, key=fits)
    return sizes[first] if first < len(sizes) else None


def _unpinned_if_needed(question: Question, setup: Setup) -> Setup:
    """Return the setup without page-locked memory if CPU memory is short.

    torch rounds page-locked tensors up to powers of two.
    """
    if question.wanted.pin_memory is not None:
        return setup
    fits = question.measure(setup).host_bytes <= (1 - question.wanted.margin) * question.cluster.host_bytes
    return setup if fits else replace(setup, pin_memory=False)


def _fastest(candidates: Sequence[Candidate], alike: float = ALIKE) -> Candidate:
    """Return the simplest of the candidates whose time is within a fraction `alike` of the fastest."""
    most = min(c.seconds_per_sample for c in candidates) * (1 + alike + 1e-9)
    return min((c for c in candidates if c.seconds_per_sample <= most), key=lambda c: _complexity(c.setup))


def _complexity(setup: Setup) -> tuple[float, ...]:
    """Return a sort key: how far a setup is from plain training."""
    rank = {"none": 0, "cpu": 1, "nvme": 2}
    stage = 0 if setup.stage is None else setup.stage + 0.5
    part = 0.0 if setup.ratio == 1.0 else setup.ratio
    return (
        rank[setup.offload_param],
        rank[setup.offload_optimizer],
        part,
        stage,
        setup.activation_checkpointing,
        setup.stage == 2 and setup.overlap_comm,
        -setup.micro_batch,
    )


def _reasons(question: Question, table: tuple[Candidate, ...], chosen: Candidate) -> dict[str, str]:
    """Return the reason for the value of each field in the chosen setup."""
    cluster, setup, needed = question.cluster, chosen.setup, chosen.footprint
    fits = f"{show_bytes(needed.device_bytes)} of {show_bytes(cluster.device_bytes)} on each device"
    if setup.offload_optimizer != "none":
        fits += f", {show_bytes(needed.host_bytes)} of {show_bytes(cluster.host_bytes)} in CPU memory"

    def closest(candidates: Iterable[Candidate]) -> str:
        """Describe, as a sentence, the least demanding candidate that lacks memory; "" if none lacks memory."""
        least = min((c for c in candidates if c.short), key=question.excess, default=None)
        return "" if least is None else f"{name_setup(least.setup)} needs {least.rejected}"

    def of_device(name: str) -> str:
        if getattr(setup, name) == "none":
            return "the fastest that fits needs none"
        without = closest(c for c in table if getattr(c.setup, name) == "none")
        return f", since {without}" if without else "the fastest that fits"

    faster = closest(c for c in table if c.seconds_per_sample < chosen.seconds_per_sample)
    knowledge = f"({question.work.activations.knowledge})"
    groups = "one group is updated at a time" if setup.ratio == 1.0 else "small enough for the ratio to act"
    if setup.offload_optimizer == "nvme":
        groups = "buffers have the size of the largest sub-group"
    reasons = {
        "stage": f"the fastest that fits, with {fits}{f'; {faster}' if faster else ''} {knowledge}",
        "offload_optimizer": of_device("offload_optimizer"),
        "offload_param": of_device("offload_param"),
        "ratio": "the complete optimizer is on one side" if setup.ratio == 1.0 else "the rest fits on the device",
        "micro_batch": f"the largest that fits, with {fits} {knowledge}",
        "sub_group_size": f": {groups}",
        "pin_memory": ": page-locked tensors are rounded up, and CPU memory is short",
        "overlap_comm": ": gradients are reduced during the backward",
    }
    return {name: f"by the plan{why if why[0] in ',:' else f' {why}'}" for name, why in reasons.items()}
