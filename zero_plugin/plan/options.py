"""The setups that a plan chooses among under what the user has fixed, and the setup that a configuration is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal

from zero_plugin.config.resolve.facts import PLACEMENT, ModelFacts, Precision, Resolved
from zero_plugin.config.resolve.resolve import choose_bucket, choose_persistence_threshold
from zero_plugin.config.schema import deepspeed_default
from zero_plugin.config.tree import KeyPath
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.plan.situation import Cluster, Device, ModelSizes, OptimizerSizes, Setup, Workload
from zero_plugin.plan.states import sub_groups_on_device

# Without a global batch, micro-batches are powers of two up to this.
_LARGEST_MICRO_BATCH: Final = 4096
_RATIOS: Final = tuple(tenths / 10 for tenths in range(9, 0, -1))
_GROUPS: Final = 20  # sub-groups of a process, so that a tenth of them is some
# Optimizer and parameters. Weights follow the states, which are eight times as large, and not the other way round.
_OFFLOADS: Final[tuple[tuple[Device, Device], ...]] = (
    ("none", "none"),
    ("cpu", "none"),
    ("cpu", "cpu"),
    ("nvme", "none"),
    ("nvme", "cpu"),
    ("nvme", "nvme"),
)
_GRADIENT_BYTES: Final[dict[Precision, int]] = {"no": 4, "bf16": 4, "fp16": 2}  # as resolution settles it


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the user has fixed; None is free. The fields are those of `Setup`, and:

    Attributes:
        stage: `ddp` is training without ZeRO. Free, it is that or stages 1 to 3; stage 0 is only taken where it is
            asked for.
        ddp: whether a free stage may be training without ZeRO.
        global_batch: samples per optimizer step, on all processes together. Free, the micro-batch is the largest power
            of two that fits, and what counts is the time per sample.
        margin: the share of device, host and disk that stays free, since a peak is predicted within 10 %.
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
    allgather_bucket: int | None = None
    prefetch_bucket: int | None = None
    persistence_threshold: int | None = None
    max_live_parameters: int | None = None
    max_reuse_distance: int | None = None
    param_buffer: int | None = None
    overlap_comm: bool | None = None
    pin_memory: bool | None = None
    gradient_views: bool | None = None
    global_batch: int | None = None
    margin: float = 0.1


@dataclass(frozen=True, slots=True)
class Option:
    """One line of a plan: setups that differ only in `ratio`, and in the batch that each then gets.

    Attributes:
        setups: from the least memory on the device to the most.
        refused: why this cannot run whatever the memory; "" where it can.
    """

    setups: tuple[Setup, ...]
    refused: str = ""


def options(work: Workload, cluster: Cluster, wanted: Wanted) -> Iterator[Option]:
    """All of them, the simpler ones first: less offload, a lower stage, no checkpointing.

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
            setup = _at_stage(base, stage, offloads, wanted)
            for recomputed in checkpointing:
                recomputing = replace(setup, activation_checkpointing=recomputed)
                yield from _ratios(recomputing, work.model, work.optimizer, cluster, wanted)
    if not found:
        parts = {"stage": wanted.stage, "optimizer to": wanted.offload_optimizer, "parameters to": wanted.offload_param}
        asked = ", ".join(f"{name} {'auto' if value is None else value}" for name, value in parts.items())
        fix = "The optimizer goes to cpu from stage 1 up; parameters, and anything on nvme, need stage 3."
        if wanted.ratio not in (None, 1.0):
            asked += f", ratio {wanted.ratio:g}"
            fix += " A ratio below 1 needs stage 3, and the optimizer on cpu."
        raise ConfigError([Problem("plan", "zero_optimization", f"no such strategy: {asked}", fix)])


def batches(cluster: Cluster, wanted: Wanted) -> list[dict[str, Any]]:
    """The `micro_batch` and `accumulation` that give the global batch, the largest micro-batch first.

    Raises:
        ConfigError: none do.
    """
    processes, micro, accumulation = cluster.processes, wanted.micro_batch, wanted.accumulation
    if wanted.global_batch is None:
        exponents = range(_LARGEST_MICRO_BATCH.bit_length() - 1, -1, -1)
        sizes = [micro] if micro is not None else [2**exponent for exponent in exponents]
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
    """What is the same on every line, with the bucket sizes that the resolution will write."""
    largest = max((p.elements for p in model.parameters), default=0)
    facts = ModelFacts(model.hidden_size, "", largest, model.elements)
    chosen = {
        "reduce_bucket": choose_bucket(facts),
        "allgather_bucket": choose_bucket(facts),
        "prefetch_bucket": choose_bucket(facts, 0.9),
        "persistence_threshold": choose_persistence_threshold(facts),
    }
    sizes = {name: size for name, found in chosen.items() for size, _ in [found or (None, "")] if size is not None}
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


def _stages(wanted: Wanted, offloads: tuple[Device, Device]) -> Iterator[Literal[0, 1, 2, 3] | None]:
    if wanted.stage is not None:
        asked: list[Literal[0, 1, 2, 3] | None] = [None if wanted.stage == "ddp" else wanted.stage]
    else:
        asked = [None, 1, 2, 3] if wanted.ddp else [1, 2, 3]
    needs_three = offloads[1] != "none" or "nvme" in offloads or wanted.ratio not in (None, 1.0)
    lowest = 3 if needs_three else 1 if offloads[0] == "cpu" else 0
    yield from (stage for stage in asked if (stage or 0) >= lowest)


def _at_stage(base: Setup, stage: Literal[0, 1, 2, 3] | None, offloads: tuple[Device, Device], wanted: Wanted) -> Setup:
    # What DeepSpeed overlaps by itself: at stage 2 that is known to give wrong gradients on some machines.
    overlap = stage == 3 if wanted.overlap_comm is None else wanted.overlap_comm and (stage or 0) >= 2
    return replace(
        base, stage=stage, offload_optimizer=offloads[0], offload_param=offloads[1], overlap_comm=bool(overlap)
    )


def _ratios(
    setup: Setup, model: ModelSizes, optimizer: OptimizerSizes, cluster: Cluster, wanted: Wanted
) -> Iterator[Option]:
    """The optimizer offloaded whole, and in part.

    Stage 3 updates one sub-group at a time, so small ones need less beside the states, and smaller buffers for a disk;
    and only where there are several can a part of them be offloaded.
    """
    refused = ""
    if "nvme" in (setup.offload_optimizer, setup.offload_param) and not cluster.nvme_bytes:
        refused = "no NVMe disk is stated"
    if setup.stage == 3:
        own = model.trainable // cluster.processes
        size = wanted.sub_group_size or min(setup.sub_group_size, max(1, own // _GROUPS))
        setup = replace(setup, sub_group_size=size)
    if setup.stage != 3 or setup.offload_optimizer != "cpu":
        yield Option((setup,), refused)
        return
    if wanted.ratio in (None, 1.0):
        yield Option((setup,), refused)
    if wanted.ratio is not None:
        parts = [replace(setup, ratio=wanted.ratio)] if wanted.ratio != 1.0 else []
    else:
        parts = [replace(setup, ratio=ratio) for ratio in _RATIOS]
        parts = [part for part in parts if sub_groups_on_device(model, part, cluster.processes)]
    if parts:
        if not refused and optimizer.name not in ("adam", "adamw"):
            refused = "only DeepSpeed's own Adam steps on host and device at once"
        yield Option(tuple(parts), refused)


Stage = Literal[0, 1, 2, 3] | None

_ZERO: Final = "zero_optimization"
_ELEMENT_BYTES: Final[Mapping[str, int]] = {"fp32": 4, "bf16": 2, "fp16": 2}

# The key of a configuration that settles each field of a setup; `pin_memory` has two.
KEYS: Final[Mapping[str, KeyPath]] = {
    **dict(zip(("stage", "offload_optimizer", "offload_param"), PLACEMENT, strict=True)),
    "ratio": (_ZERO, "offload_optimizer", "ratio"),
    "sub_group_size": (_ZERO, "sub_group_size"),
    "micro_batch": ("train_micro_batch_size_per_gpu",),
    "accumulation": ("gradient_accumulation_steps",),
    "reduce_bucket": (_ZERO, "reduce_bucket_size"),
    "allgather_bucket": (_ZERO, "allgather_bucket_size"),
    "prefetch_bucket": (_ZERO, "stage3_prefetch_bucket_size"),
    "persistence_threshold": (_ZERO, "stage3_param_persistence_threshold"),
    "max_live_parameters": (_ZERO, "stage3_max_live_parameters"),
    "max_reuse_distance": (_ZERO, "stage3_max_reuse_distance"),
    "param_buffer": (_ZERO, "offload_param", "buffer_size"),
    "overlap_comm": (_ZERO, "overlap_comm"),
}


def running_setup(resolved: Resolved, stage: Stage) -> Setup:
    """What the memory of a run is computed from; activation checkpointing is the script's own, and part of the model.

    Args:
        resolved: its configuration.
        stage: that it runs; None without ZeRO, where nothing is offloaded.
    """
    tree = resolved.tree
    kinds: dict[str, Any] = {field.name: type(field.default) for field in fields(Setup)}
    found: dict[str, Any] = {}
    for name, path in KEYS.items():
        if path in PLACEMENT:
            continue
        value = tree.value(*path)
        if not isinstance(value, bool | int | float):
            default = deepspeed_default(path)
            value = None if default is None else default[0]
        if isinstance(value, bool | int | float):
            found[name] = kinds[name](value)
    width = _ELEMENT_BYTES.get(str(tree.value("data_types", "grad_accum_dtype")))
    return Setup(
        stage=stage,
        precision=resolved.precision,
        gradient_bytes=width or (4 if resolved.precision == "no" else 2),
        offload_optimizer="none" if stage is None else resolved.offload_device("optimizer"),
        offload_param="none" if stage is None else resolved.offload_device("param"),
        pin_memory=any(tree.value(_ZERO, f"offload_{what}", "pin_memory") is True for what in ("optimizer", "param")),
        **found,
    )
