"""Which fields a plan fills, and with what reason.

Between a configuration and a plan: what its fields fix, which open ones the plan fills, and with what reason.

Has a plan choose what a configuration leaves open, before a run and in one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from zero_plugin.config.amounts import show_bytes
from zero_plugin.config.document import Document
from zero_plugin.config.resolve.draft import deepspeed_default
from zero_plugin.config.resolve.facts import PLACEMENT, Facts, Resolved
from zero_plugin.config.resolve.training import MICRO_BATCH, unplanned_micro_batch
from zero_plugin.config.tree import AUTO, KeyPath, Tree, dotted
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.plan.options import KEYS, Wanted
from zero_plugin.plan.search import Candidate, Change, Plan, search, what_if
from zero_plugin.plan.situation import Activations, Cluster, ModelSizes, Setup, asked_optimizer, name_setup

Planned = Mapping[KeyPath, tuple[Any, str]]

# The share of memory that stays free, by how the activations are known.
TRACED: Final = 0.1
BY_FORMULA: Final = 0.2
UNKNOWN: Final = 0.35

_ZERO: Final = "zero_optimization"
_STAGE, _OPTIMIZER, _PARAM = PLACEMENT
_RATIO: Final = (_ZERO, "offload_optimizer", "ratio")
_SUB_GROUP: Final = (_ZERO, "sub_group_size")
_PINNED: Final = tuple((_ZERO, what, "pin_memory") for what in ("offload_optimizer", "offload_param"))

# The field of a setup that each key of the configuration settles.
_CHOSEN: Final[Mapping[KeyPath, str]] = {
    _STAGE: "stage",
    _OPTIMIZER: "offload_optimizer",
    _PARAM: "offload_param",
    _RATIO: "ratio",
    _SUB_GROUP: "sub_group_size",
    MICRO_BATCH: "micro_batch",
}
_SIZES: Final = (
    "reduce_bucket",
    "allgather_bucket",
    "prefetch_bucket",
    "persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
)


def open_fields(tree: Tree, facts: Facts) -> tuple[KeyPath, ...]:
    """The fields that only a plan can fill, as far as a training configuration leaves them open.

    The micro-batch is one of them where ZeRO trains and no loader tells it, now or, before a run, yet.

    Args:
        tree: the training configuration.
        facts: of the loop, and whether one may still come.
    """
    paths = (*PLACEMENT, _RATIO, *([MICRO_BATCH] if _plans_micro_batch(facts) else ()))
    return tuple(path for path in paths if tree.value(*path) is AUTO)


def nvme_folder(tree: Tree) -> Path | None:
    """Where a training configuration has NVMe offload keep its files."""
    folders = [tree.value(_ZERO, f"offload_{what}", "nvme_path") for what in ("optimizer", "param")]
    return next((Path(folder) for folder in folders if isinstance(folder, str)), None)


def fixed_fields(document: Document, resolved: Resolved, facts: Facts, *, sized: bool, margin: float) -> Wanted:
    """What the configuration fixes of a way of training.

    Args:
        document: what was asked for, with ZeRO.
        resolved: the same, resolved as far as it can be without a plan.
        facts: of the loop and the machine.
        sized: whether it is known what a sample takes; else a plan chooses no micro-batch.
        margin: see `Wanted`.
    """
    tree, asked = resolved.tree, document.deepspeed
    total = _number(asked.value("train_batch_size"))
    steps = _number(asked.value("gradient_accumulation_steps"))
    ratio = tree.value(*_RATIO, default=1.0)
    micro = facts.loop.micro_batch or _number(asked.value(*MICRO_BATCH))
    if micro is None and not (sized and _plans_micro_batch(facts)):
        micro, _ = unplanned_micro_batch(total, steps, facts.machine.processes)
    types = {"fp32": 4, "bf16": 2, "fp16": 2}
    unpinned = facts.machine.accelerator == "cpu" or any(asked.value(*path) is False for path in _PINNED)
    # Beside an open stage, device or ratio these two are a plan's, too; a micro-batch alone changes nothing else.
    is_placed = all(asked.value(*path) is not AUTO for path in (*PLACEMENT, _RATIO))
    return Wanted(
        stage=_fixed(tree, _STAGE, 0),
        ddp=False,
        precision=resolved.precision,
        gradient_bytes=types.get(str(tree.value("data_types", "grad_accum_dtype"))),
        offload_optimizer=_fixed(tree, _OPTIMIZER, "none"),
        offload_param=_fixed(tree, _PARAM, "none"),
        ratio=None if ratio is AUTO else float(ratio),
        sub_group_size=_size(tree, _SUB_GROUP) if is_placed else _number(asked.value(*_SUB_GROUP)),
        micro_batch=micro,
        accumulation=steps or (None if total else 1),
        activation_checkpointing=False,  # the script's own is part of the model
        overlap_comm=asked.value(_ZERO, "overlap_comm") if asked.value(_ZERO, "overlap_comm") is not AUTO else None,
        param_buffer=_number(tree.value(*KEYS["param_buffer"])),  # no default: where it is open, the model tells
        pin_memory=False if unpinned else (True if is_placed else None),
        gradient_views=None,  # DDP's
        global_batch=total,
        margin=margin,
        **{name: _size(tree, KEYS[name]) for name in _SIZES},
    )


def planned_values(
    plan: Plan, wanted: Wanted, cluster: Cluster, asked: Tree, activations: Activations
) -> dict[KeyPath, tuple[Any, str]]:
    """The value and the reason for every field that is open in `asked` and that the plan has chosen.

    Args:
        plan: something fits.
        wanted: what it was asked.
        cluster: the machines that it was made for.
        asked: the training configuration.
        activations: that it was made with; how they are known goes into the reasons.
    """
    chosen = plan.chosen
    assert chosen is not None, "what fits nowhere fills nothing"
    paths = [path for path in _CHOSEN if asked.value(*path) is AUTO and path != MICRO_BATCH]
    if wanted.micro_batch is None:
        paths.append(MICRO_BATCH)
    if chosen.setup.sub_group_size != Setup().sub_group_size and asked.value(*_SUB_GROUP) is None:
        paths.append(_SUB_GROUP)  # it counts on smaller ones than DeepSpeed's default
    found = {path: (getattr(chosen.setup, _CHOSEN[path]), _reason(path, plan, chosen, cluster)) for path in paths}
    for path in found.keys() & {_STAGE, MICRO_BATCH}:
        found[path] = (found[path][0], f"{found[path][1]} ({activations.knowledge})")
    if chosen.setup.offload_optimizer == "none":
        found.pop(_RATIO, None)
    if not chosen.setup.pin_memory and wanted.pin_memory is None:
        why = "by the plan: page-locked tensors are rounded up, and host memory is short"
        found |= {path: (False, why) for path in _PINNED if asked.has_section(*path[:-1])}
    if found.get(_SUB_GROUP, (0, ""))[0] == Setup().sub_group_size:
        del found[_SUB_GROUP]  # DeepSpeed's default: the rule for it says so
    return found


def fits_nowhere(
    plan: Plan, changes: Sequence[Change], cluster: Cluster, activations: Activations, where: str
) -> ConfigError:
    """The error of a plan by which nothing fits: the closest, what it is short of, and what would do.

    Args:
        plan: without a choice.
        changes: from `what_if`.
        cluster: the machines.
        activations: that it was made with.
        where: what left the choice to the plan.
    """
    least = min([c for c in plan.candidates if c.short] or plan.candidates, key=lambda c: _excess(c, cluster))
    ways = "; ".join(_as_key(change.what) for change in changes[:3])
    fix = (
        f"Any of these would do: {ways}." if ways else "No single change would do; take a smaller model, or more GPUs."
    )
    message = f"auto, but nothing fits: {name_setup(least.setup)} needs {least.rejected} ({activations.knowledge})"
    return ConfigError([Problem(where, "zero_optimization", message, fix)])


def _excess(candidate: Candidate, cluster: Cluster) -> float:
    """What it needs in shares of what is there, of the kind of memory that is shortest."""
    needed = candidate.footprint
    return max(needed.device_bytes / cluster.device_bytes, needed.host_bytes / max(1, cluster.host_bytes))


def _reason(path: KeyPath, plan: Plan, chosen: Candidate, cluster: Cluster) -> str:
    device = f"{show_bytes(chosen.footprint.device_bytes)} of {show_bytes(cluster.device_bytes)} on each device"
    host = f", {show_bytes(chosen.footprint.host_bytes)} of {show_bytes(cluster.host_bytes)} in host memory"
    fits = device + (host if chosen.setup.offload_optimizer != "none" else "")
    if path == _STAGE:
        return f"by the plan the fastest that fits, with {fits}{_simpler(plan, chosen, cluster)}"
    if path in (_OPTIMIZER, _PARAM):
        return _reason_of_device(_CHOSEN[path], plan, chosen, cluster)
    if path == _RATIO:
        whole = "the whole optimizer is on one side" if chosen.setup.ratio == 1.0 else "the rest fits on the device"
        return f"by the plan {whole}"
    if path == MICRO_BATCH:
        return f"by the plan the largest that fits, with {fits}"
    if chosen.setup.offload_optimizer == "nvme":
        return "by the plan: buffers are of the largest sub-group"
    acts = chosen.setup.ratio < 1
    return "by the plan: small enough for the ratio to act" if acts else "by the plan: one group is updated at a time"


def _reason_of_device(field: str, plan: Plan, chosen: Candidate, cluster: Cluster) -> str:
    if getattr(chosen.setup, field) == "none":
        return "by the plan the fastest that fits needs none"
    without = [c for c in plan.candidates if c.short and getattr(c.setup, field) == "none"]
    if not without:
        return "by the plan the fastest that fits"
    least = min(without, key=lambda c: _excess(c, cluster))
    return f"by the plan, since {name_setup(least.setup)} needs {least.rejected}"


def _simpler(plan: Plan, chosen: Candidate, cluster: Cluster) -> str:
    """Of the ways that would be faster, the one that needs the least, and why it cannot be had."""
    faster = [c for c in plan.candidates if c.short and c.seconds_per_sample < chosen.seconds_per_sample]
    if not faster:
        return ""
    least = min(faster, key=lambda c: _excess(c, cluster))
    return f"; {name_setup(least.setup)} needs {least.rejected}"


def _as_key(change: str) -> str:
    """A change of a `Wanted` field as what to write."""
    field, free, rest = change.partition(" free instead of ")
    if not free:
        return change
    if field == "activation_checkpointing":
        return "activation checkpointing (transformers: gradient_checkpointing_enable())"
    if field == "pin_memory":
        return f"{' and '.join(dotted(path) for path in _PINNED)}: auto instead of {rest}"
    keys = {**KEYS, **{name: path for path, name in _CHOSEN.items()}}
    return f"{dotted(keys[field])}: auto instead of {rest}"


def _plans_micro_batch(facts: Facts) -> bool:
    """Whether the micro-batch is left to a plan: what is not trained has none, and off DeepSpeed no number needs it."""
    trains = facts.optimizer is not None or not facts.complete
    return trains and facts.strategy == "deepspeed" and facts.loop.micro_batch is None


def _fixed(tree: Tree, path: KeyPath, default: Any) -> Any:
    """The settled value, None where it is open."""
    value = tree.value(*path, default=default)
    return None if value is AUTO else default if value is None else value


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _size(tree: Tree, path: KeyPath) -> int | None:
    """Elements as resolution has settled them, else DeepSpeed's default; None where the model will tell."""
    value = tree.value(*path)
    if value is AUTO:
        return None
    default = deepspeed_default(path)
    return _number(int(default[0]) if value is None and default is not None else value)


def fill_fields(
    document: Document,
    resolved: Resolved,
    facts: Facts,
    model: ModelSizes,
    activations: Activations,
    cluster: Cluster,
    *,
    margin: float,
) -> Planned:
    """The values of the fields that only a plan can fill, with their reasons.

    Args:
        document: what was asked for, with ZeRO and a field open.
        resolved: the same, resolved as far as it can be without a plan.
        facts: of the loop and the machine; complete in a run.
        model: its sizes.
        activations: in the resolved precision.
        cluster: the machines.
        margin: see `Wanted`.

    Raises:
        ConfigError: nothing fits, or what is fixed excludes itself.
    """
    on_gpu = facts.machine.accelerator == "cuda"
    optimizer = asked_optimizer(resolved.optimizer, facts.optimizer, on_gpu=on_gpu)
    sized = activations.saved.per_sample > 0
    wanted = fixed_fields(document, resolved, facts, sized=sized, margin=margin)
    plan = search(model, activations, optimizer, cluster, wanted)
    if plan.chosen is None:
        changes = what_if(model, activations, optimizer, cluster, wanted).changes
        first = open_fields(document.deepspeed, facts)[0]
        raise fits_nowhere(plan, changes, cluster, activations, document.deepspeed.entries[first].origin.where)
    return planned_values(plan, wanted, cluster, document.deepspeed, activations)
