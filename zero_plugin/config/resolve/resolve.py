"""Rules that fill every open field from facts: precision, batch sizes, ZeRO. See also `optimizer`.

The rules work in a run, before a run, and for scripts that use other libraries.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal

from zero_plugin.config import keys
from zero_plugin.config.document import Document
from zero_plugin.config.keys import BATCH, CLIPPING, PLACEMENT, STAGE, TRAINING, ZERO
from zero_plugin.config.parallelism import SEQUENCE_KEY, sequence_parallel_size
from zero_plugin.config.resolve.facts import Draft, Facts, MachineFacts, ModelFacts, Resolved, StrategyName
from zero_plugin.config.resolve.optimizer import settle_optimizer, settle_scheduler
from zero_plugin.config.rules.sections import unequal_sequence_groups
from zero_plugin.config.rules.training import OPTIMIZING, PRECISION, Asked, check_one_precision
from zero_plugin.config.rules.zero import STAGES, check_offload
from zero_plugin.config.schema import DEEPSPEED_AUTO, deepspeed_default, deepspeed_schema, is_passed_on
from zero_plugin.config.tree import AUTO, Entry, KeyPath, Origin, Tree, holds_auto, legal, show, violations
from zero_plugin.errors import ConfigError, Problem

_RANDOM_LTD = ("data_efficiency", "data_routing", "random_ltd")


def resolve(document: Document, facts: Facts) -> Resolved:
    """Fill every open field of `document` from `facts`. The document itself stays unchanged.

    Values that a user typed keep their origin. Every other value has the reason of the rule that found it. Before a run
    the facts are not `complete`. Fields that the run may still fill then stay open, and are in the result's `missing`.

    Raises:
        ConfigError: fields cannot be filled, or values contradict the loop, the machine or each other. Lists all of
            them.
    """
    draft = Draft(document, facts)
    settle_precision(draft)  # this order matters: each topic may use the ones before it
    settle_zero(draft)
    settle_engine(draft)
    settle_batch(draft)
    settle_clipping(draft)
    settle_optimizer(draft)
    settle_scheduler(draft)
    _settle_rest(draft)
    _check_planned(draft)
    _check_found(draft)
    return draft.finish()


def _settle_rest(draft: Draft) -> None:
    """Settle every other open field with the value of a related key, or with DeepSpeed's default, which is listed."""
    same_elsewhere = {
        (*_RANDOM_LTD, "global_batch_size"): (draft.value(*keys.GLOBAL_BATCH.path), keys.GLOBAL_BATCH.name),
        (*_RANDOM_LTD, "micro_batch_size"): (draft.value(*keys.MICRO_BATCH.path), "the micro batch"),
        ("data_parallel_size",): (draft.facts.machine.processes, "all processes of the run split the data"),
        keys.SEQUENCE.path: (1, "each process has samples of its own"),
    }
    for path in draft.still_open():
        if path in DEEPSPEED_AUTO:
            continue
        default = deepspeed_default(path)
        value, reason = same_elsewhere.get(path, (None, ""))
        if value is not None:
            draft.put(path, value, reason)
        elif reason:
            draft.miss(path, f"value of {reason} yet", "Write a value.")
        elif default is None:
            draft.refuse(path, "auto, but there is no rule and no default for this key.", "Write a value.")
        else:
            draft.put(path, default[0], "no rule fills it", "default")


def _check_planned(draft: Draft) -> None:
    """Check the document again, with the stage and devices that a plan has chosen: open fields break no rule."""
    settled = {path: entry for path in (*PLACEMENT, *_SWITCHES) if (entry := draft.get(*path)) is not None}
    if draft.on_deepspeed and any(path in PLACEMENT and settled[path].origin.kind == "rule" for path in settled):
        planned = replace(draft.document, deepspeed=draft.document.deepspeed.replace(settled))
        for check in (*PRECISION, *STAGES, check_offload, *OPTIMIZING):
            for problem in check(Asked(planned)):
                if problem.severity == "error":
                    draft.add(problem)


def _check_found(draft: Draft) -> None:
    """Check values that rules took from the loop against the schema, as typed values are."""
    for found in violations(draft.tree, deepspeed_schema()):
        entry = draft.tree.get(*found.path)
        if entry is None or entry.origin.typed_by_user:
            continue
        if found.kind == "unknown":
            message = f"{draft.value(found.path[0], 'type')} has no such parameter: {entry.origin.reason}."
            draft.refuse(found.path, message, f"Drop the argument; it has {', '.join(found.wanted['properties'])}.")
        else:
            message = f"{show(found.value)} is not legal here: {entry.origin.reason}."
            draft.refuse(found.path, message, f"Give {legal(found.wanted)}.")


def check_sequence_groups(document: Document, processes: int) -> int:
    """Return the number of processes that share each sample.

    Raises:
        ConfigError: the processes cannot be divided into groups of that size.
    """
    shared = sequence_parallel_size(document)
    if (problem := unequal_sequence_groups(shared, processes)) is not None:
        raise ConfigError([Problem(document.place(("deepspeed", SEQUENCE_KEY)), SEQUENCE_KEY, *problem)])
    return shared


def resolve_before_run(
    document: Document,
    *,
    accelerator: Literal["cpu", "cuda", "xla"],
    processes: int,
    strategy: StrategyName,
    bf16: bool = True,
) -> Resolved:
    """Resolve as much as possible without a loop and a model. Other fields stay open, in the result's `missing`.

    Args:
        document: a checked document.
        accelerator: device of the workers; a GPU is assumed to compute in fp16 until a worker checks.
        processes: workers on all machines.
        strategy: the strategy that the document requests.
        bf16: whether the device computes in bf16.

    Raises:
        ConfigError: problems for any script, e.g. fp16 under DeepSpeed on a CPU.
    """
    shared = check_sequence_groups(document, processes)
    groups = max(1, processes // shared)
    machine = MachineFacts(accelerator, groups, bf16, fp16=accelerator == "cuda", shared_by=shared)
    return resolve(document, Facts(machine=machine, strategy=strategy, complete=False))


_GLOBAL, _MICRO, _ACCUMULATION = (key.path for key in BATCH)


def settle_batch(draft: Draft) -> None:
    """Settle the three batch sizes, or refuse them and show the arithmetic."""
    settled_global = draft.value(*_GLOBAL)
    if draft.get(*_MICRO) is None or _was_planned(draft):
        if draft.facts.loop.micro_batch is not None:
            _use_loader_micro_batch(draft)
        elif _MICRO in draft.facts.planned:
            draft.put(_MICRO, *draft.facts.planned[_MICRO], logged=True)
        elif not draft.facts.complete:
            _leave_batch_open(draft)
            return
        else:
            processes = draft.facts.machine.processes
            draft.put(_MICRO, *unplanned_micro_batch(settled_global, draft.value(*_ACCUMULATION), processes))
    agreed = _agrees_with_loader(draft)
    if draft.get(*_ACCUMULATION) is None:
        steps, reason = _accumulation(draft)
        draft.put(_ACCUMULATION, steps, reason, logged=steps > 1)
    product = draft.value(*_MICRO) * draft.value(*_ACCUMULATION) * draft.facts.machine.processes
    if settled_global is None:
        draft.put(_GLOBAL, product, _arithmetic(draft))
    elif settled_global != product and agreed:  # if not agreed, this would advise on a wrong micro-batch
        fix = f'Write {product} or "auto", or change one of the three factors.'
        draft.refuse(_GLOBAL, f"{settled_global} is not {_arithmetic(draft)} = {product}.", fix)


def _leave_batch_open(draft: Draft) -> None:
    """Leave sizes open that depend on the DataLoader's batch size, before a run without a loader."""
    draft.miss(_MICRO, "training DataLoader to tell its batch size", "Prepare the training DataLoader.")
    if draft.get(*_ACCUMULATION) is None:
        if draft.get(*_GLOBAL) is None:
            draft.put(_ACCUMULATION, *_accumulation(draft))
        else:
            draft.miss(_ACCUMULATION, "micro batch to divide train_batch_size by", "Prepare the training DataLoader.")
    if draft.get(*_GLOBAL) is None:
        draft.miss(_GLOBAL, "micro batch to multiply", "Prepare the training DataLoader.")


def unplanned_micro_batch(total: int | None, steps: int | None, processes: int) -> tuple[int, str]:
    """Return a micro-batch size and its reason without a loader or plan: what the global batch leaves for it.

    Args:
        total: the global batch; None if it is not written.
        steps: micro-batches per optimizer step; None for 1.
        processes: data-parallel processes.
    """
    steps = steps or 1
    if total is not None and total >= steps * processes:
        reason = f"train_batch_size {total} ÷ ({steps} accumulation × {processes} processes)"
        return total // (steps * processes), reason
    return 1, (
        "neither a training loader nor a plan gives the size: prepare the training DataLoader, or write a number; "
        "training does not depend on it, only DeepSpeed's speed report"
    )


def _was_planned(draft: Draft) -> bool:
    """Return whether a plan before the run chose the micro-batch, and a loader has another one."""
    entry, loop = draft.get(*_MICRO), draft.facts.loop
    return not (entry is None or entry.origin.typed_by_user or loop.micro_batch in (None, entry.value))


def _use_loader_micro_batch(draft: Draft) -> None:
    """Set the micro-batch size to the DataLoader's. Log it if a plan assumed another size.

    The plan was made before the run, or before the DataLoader was prepared.
    """
    loop, planned = draft.facts.loop, draft.facts.planned.get(_MICRO)
    planned_size = draft.value(*_MICRO, default=planned[0] if planned else loop.micro_batch)
    if planned_size != loop.micro_batch:
        loops = f"the loop trains on {loop.micro_batch} ({loop.micro_batch_reason})"
        draft.log(f"the plan was made for {planned_size} samples per process; {loops}")
    draft.put(_MICRO, loop.micro_batch, loop.micro_batch_reason)


def _accumulation(draft: Draft) -> tuple[int, str]:
    """Return micro-batches per optimizer step: the number that the global batch requires, or 1."""
    total, micro, world = draft.value(*_GLOBAL), draft.value(*_MICRO), draft.facts.machine.processes
    if total is not None and total > micro * world and total % (micro * world) == 0:
        return total // (micro * world), f"train_batch_size {total} ÷ ({micro} × {world} processes)"
    return 1, "neither code nor configuration sets accumulation"


def _agrees_with_loader(draft: Draft) -> bool:
    """Return whether the loader has the settled micro-batch. If not, refuse that, because the loader's would run."""
    loop = draft.facts.loop
    typed = draft.value(*_MICRO)
    if loop.micro_batch is None or not loop.micro_batch_fixed or loop.micro_batch == typed:
        return True
    message = f"{typed}, but the loop trains on {loop.micro_batch} ({loop.micro_batch_reason})."
    fix = f'Write {loop.micro_batch} or "auto", or build the DataLoader with batch_size={typed}.'
    draft.refuse(_MICRO, message, fix)
    return False


def _arithmetic(draft: Draft) -> str:
    micro, steps = draft.value(*_MICRO), draft.value(*_ACCUMULATION)
    machine = draft.facts.machine
    what = "processes" if machine.shared_by == 1 else f"groups of {machine.shared_by} processes"
    return f"{micro} (micro batch) × {steps} (accumulation) × {machine.processes} ({what})"


def settle_clipping(draft: Draft) -> None:
    """Settle gradient clipping. 0 (no clipping) is written out, because DeepSpeed clips at 1.0 by default."""
    if draft.get(*CLIPPING.path) is None:
        why = "none is configured; clip_grad_norm_ in the loop still clips"
        draft.put(CLIPPING.path, 0.0, why, logged=draft.is_open(*CLIPPING.path))


_HALVES: Final = ("fp16", "bf16")


def expected_precision(document: Document, machine: MachineFacts) -> str:
    """Return the precision of a model that is prepared now: `no`, `fp16` or `bf16`."""
    return _choose(Draft(document, Facts(machine=machine)))[0]


def settle_precision(draft: Draft) -> None:
    """Settle `mixed_precision`, `fp16.enabled` and `bf16.enabled` to one precision, then check it."""
    asked = _asked(draft)
    precision, reason = _choose(draft)
    by_flag = asked is not None and asked.value is not AUTO and asked.origin.kind == "flag"
    for half in _HALVES:
        section = draft.get(half, "enabled")
        if section is None:
            draft.put((half, "enabled"), half == precision, reason)
        elif section.value is not (half == precision) and by_flag:  # a flag overrides the file
            draft.put((half, "enabled"), half == precision, f"{reason}, which overrides {section.origin.where}")
    if asked is None or asked.value is AUTO:
        draft.put_launch("mixed_precision", precision, reason, logged=asked is not None)
    _check_device(draft, precision)
    _check_settled(draft)
    if precision == "bf16" and draft.on_deepspeed and draft.is_unsettled("bf16", "check_grad_overflow"):
        draft.put(("bf16", "check_grad_overflow"), True, "a step with non-finite gradients is skipped", "default")


def _check_settled(draft: Draft) -> None:
    """Check the settled precision, with its reason, against the rules that checked the open document."""
    was_open = Asked(draft.document).precision is None
    asked = Asked(replace(draft.document, launch=draft.launch, deepspeed=draft.tree))
    rules = PRECISION if draft.on_deepspeed else (check_one_precision,)
    for problem in (problem for rule in rules for problem in rule(asked)):
        if problem.severity == "error":
            draft.add(problem)
        elif was_open:
            draft.log(f"{problem.key} = {problem.value} {problem.message}.")


def _asked(draft: Draft) -> Entry | None:
    asked = draft.launch.get("mixed_precision")
    return None if asked is None or asked.value is None else asked


def _choose(draft: Draft) -> tuple[str, str]:
    """Return the precision and why: the requested one, the enabled section, or the best for the hardware."""
    asked, facts = _asked(draft), draft.facts
    if asked is not None and asked.value is not AUTO:
        return asked.value, f"mixed_precision is {asked.value} ({asked.origin.where})"
    typed = {half: entry for half in _HALVES if (entry := draft.get(half, "enabled")) is not None}
    for half, entry in typed.items():
        if entry.value is True:
            return half, f"{half}.enabled is true ({entry.origin.where})"
    if asked is None:
        return "no", "mixed_precision is not given"
    machine = facts.machine
    computes = f"this {machine.accelerator} computes"
    if not facts.complete:
        computes = f"a {machine.accelerator} device is taken to compute"  # a worker checks this later
    if machine.bf16 and "bf16" not in typed:
        return "bf16", f"mixed_precision is auto and {computes} in bf16"
    if machine.fp16 and "fp16" not in typed:
        return "fp16", f"mixed_precision is auto and {computes} in fp16, not in bf16"
    return "no", f"mixed_precision is auto and {computes} in neither bf16 nor fp16"


def _check_device(draft: Draft, precision: str) -> None:
    machine = draft.facts.machine
    section = draft.get(precision, "enabled")
    path = (precision, "enabled") if section and section.origin.typed_by_user else ("mixed_precision",)
    if precision == "fp16" and draft.on_deepspeed and not machine.fp16:
        fix = "Write bf16, which DeepSpeed runs on a CPU." if machine.accelerator == "cpu" else "Write bf16 or no."
        draft.refuse(path, f"fp16 is on, but DeepSpeed does not run fp16 on a {machine.accelerator} device.", fix)
    if precision == "fp16" and machine.accelerator == "xla":
        draft.refuse(path, "fp16 is on, but a TPU computes in bf16 and fp32 only.", "Write bf16 or no.")
    if precision == "bf16" and not machine.bf16:
        draft.log(f"bf16 is on, but this {machine.accelerator} device has no bf16 arithmetic: it is emulated and slow.")


# Reducing fewer elements than the floor is limited by latency, not bandwidth (h² is one million at h = 1024). The
# ceiling is DeepSpeed's default. A larger bucket is not faster and only takes memory.
_BUCKET_FLOOR: Final = 25_000_000
BUCKET_CEILING: Final = 500_000_000
# Gathering a tensor below the floor costs a collective and saves nothing. Tensors below the threshold stay
# unpartitioned on every device, so the ceiling bounds their memory.
_PERSISTENT_FLOOR: Final = 10_000
_PERSISTENT_CEILING: Final = 1_000_000


def choose_bucket(model: ModelFacts, share: float = 1.0) -> tuple[int, str] | None:
    """Return `share` × hidden² elements (transformers' rule) or the largest parameter, clamped, at most the model.

    Returns:
        Elements and the reason; None if the model's sizes are unknown.
    """
    if model.hidden_size:
        wanted = int(share * model.hidden_size**2)
        source = f"{share:g} × {model.hidden_size}², {model.hidden_size_reason}"
    elif model.largest_parameter:
        wanted, source = int(share * model.largest_parameter), f"{share:g} × the largest parameter"
    else:
        return None
    size = min(max(wanted, _BUCKET_FLOOR), BUCKET_CEILING)
    if size != wanted:
        source += f", kept within {_BUCKET_FLOOR:,} to {BUCKET_CEILING:,} elements"
    if model.parameters and size > model.parameters:
        size, source = model.parameters, "all parameters of the model"
    return size, source


def choose_persistence_threshold(model: ModelFacts) -> tuple[int, str] | None:
    """Return 10 × hidden elements (transformers' rule), so norms and biases stay unpartitioned, with the reason.

    Return None without a hidden size.
    """
    if not model.hidden_size:
        return None
    wanted = 10 * model.hidden_size
    size = min(max(wanted, _PERSISTENT_FLOOR), _PERSISTENT_CEILING)
    clamped = "" if size == wanted else f", kept within {_PERSISTENT_FLOOR:,} to {_PERSISTENT_CEILING:,}"
    return size, f"10 × {model.hidden_size}, {model.hidden_size_reason}{clamped}"


_PLAN: Final = "plan of the memory, which needs the model"
# DeepSpeed's monitors that need a package: section, import name, package to install.
_MONITORS: Final = (
    ("tensorboard", "tensorboard", "tensorboard"),
    ("wandb", "wandb", "wandb"),
    ("comet", "comet_ml", "comet_ml>=3.41.0"),
)
_OFFLOADS: Final[tuple[Literal["offload_optimizer", "offload_param"], ...]] = ("offload_optimizer", "offload_param")

Rule = Callable[[Draft], tuple[Any, str] | None]  # None if the value depends on the model, which a run knows


def settle_zero(draft: Draft) -> None:
    """Settle the stage, the offload devices, and keys of the section that depend on them or on the model."""
    if not draft.on_deepspeed:
        _settle_without_engine(draft)
        return
    for path, chosen in draft.facts.planned.items():
        if path[0] == ZERO and draft.is_unsettled(*path):
            draft.put(path, *chosen, logged=True)
    if draft.is_open(*STAGE.path):
        fix = "Write 1, 2 or 3: 2 splits gradients and optimizer states, 3 the weights too."
        draft.miss(STAGE.path, _PLAN, fix)
    elif draft.get(*STAGE.path) is None:
        draft.put(STAGE.path, 0, "no ZeRO stage is configured", "default")
    for offload in _OFFLOADS:
        if draft.is_open(ZERO, offload, "device"):
            draft.miss((ZERO, offload, "device"), _PLAN, "Write none, cpu or nvme.")
            _leave_offload_open(draft, offload)
        elif draft.value(ZERO, offload, "device", default="none") != "none":
            _settle_offload(draft, offload)
    for key, rule in _RULES.items():
        path = (ZERO, *key.split("."))
        if draft.is_open(*path) and not draft.is_missing(*path):
            found = rule(draft)
            if found is None:
                draft.miss(path, "model to tell its size", "Prepare the model.")
            else:
                draft.put(path, *found)
    _cap_bucket(draft)
    _settle_overlap(draft)


def settle_engine(draft: Draft) -> None:
    """Set keys without which DeepSpeed's engine would break the loop's contract, or change with its release."""
    if not draft.on_deepspeed:
        return
    for key, value, reason in (
        ("managed_gradient_accumulation", False, "optimizer.step() is the one place where parameters change"),
        ("zero_allow_untested_optimizer", True, "this package itself checks that the optimizer works on flat pieces"),
        ("zero_force_ds_cpu_optimizer", False, "the optimizer of the loop is kept, also under offload"),
    ):
        if draft.is_unsettled(key):
            draft.put((key,), value, reason)
    if draft.facts.complete:
        _check_needs(draft)
    if draft.get("steps_per_print") is None:
        draft.put(("steps_per_print",), None, "DeepSpeed prints no step lines", "default")
    path = ("data_types", "grad_accum_dtype")
    if draft.is_open(*STAGE.path):  # only before a run
        if draft.is_open(*path):
            draft.miss(path, _PLAN, "Write fp32, fp16 or bf16.")
        return
    halved = draft.value("bf16", "bf16_master_weights_and_grads", default=False)
    if draft.is_unsettled(*path) and draft.value("bf16", "enabled") and _stage(draft) >= 1 and not halved:
        why = "bf16 has 8 bits of mantissa: sums of gradients lose what is below 1/256 of them"
        draft.put(path, "fp32", why, logged=True)
    elif draft.is_open(*path):
        draft.put(path, None, "gradients accumulate in the model's own type", "default")
    unchecked = draft.value("bf16", "enabled") and draft.value("bf16", "check_grad_overflow") is False
    flat = _stage(draft) == 2 or (_stage(draft) == 1 and draft.value(*path) != "fp32")
    if unchecked and not flat:
        why = "a step whose gradients are not finite is skipped all the same."
        draft.log(f"bf16.check_grad_overflow = false has no effect at stage {_stage(draft)} in this DeepSpeed: {why}")


_QUANTIZED: Final = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
_GPU_ALONE: Final[dict[KeyPath, str]] = {
    **{(ZERO, key): "its kernels need a GPU" for key in _QUANTIZED},
    ("aio", "use_gds"): "it needs a GPU",
    ("hybrid_engine", "enabled"): "its kernels need a GPU",
}
# Each switch has no effect if one before it is off.
_DROPPING: Final[tuple[KeyPath, ...]] = (
    ("data_efficiency", "enabled"),
    ("data_efficiency", "data_routing", "enabled"),
    ("data_efficiency", "data_routing", "random_ltd", "enabled"),
)


def _check_needs(draft: Draft) -> None:
    """Refuse settings whose needs the run does not meet: a GPU, or packages of DeepSpeed's monitors.

    The rules do not see a CPU that was chosen by default. DeepSpeed imports monitors' packages on rank 0 only, so other
    ranks would wait for a failed rank 0.
    """
    for path, why in _GPU_ALONE.items():
        if draft.facts.machine.accelerator == "cpu" and draft.value(*path):
            draft.refuse(path, f"true, but this run is on a CPU, and {why}.", "Delete it.")
    if draft.facts.machine.accelerator == "cpu" and all(draft.value(*path) for path in _DROPPING):
        draft.refuse(_DROPPING[-1], "true, but this run is on a CPU, and it needs a GPU.", "Delete it.")
    for section, package, wanted in _MONITORS:
        missing = package not in sys.modules and importlib.util.find_spec(package) is None
        if draft.value(section, "enabled") and missing:
            fix = f"Install it (pip install '{wanted}'), or write enabled: false."
            draft.refuse((section, "enabled"), f"true, but {package} is not installed.", fix)


def _settle_without_engine(draft: Draft) -> None:
    """Set an open stage or device to none, so the resolved config never claims that ZeRO is active."""
    for path in PLACEMENT:
        if draft.is_open(*path):
            draft.put(path, 0 if path == STAGE.path else "none", f"the {draft.facts.strategy} path has no ZeRO")


def _settle_offload(draft: Draft, offload: Literal["offload_optimizer", "offload_param"]) -> None:
    if draft.is_unsettled(ZERO, offload, "pin_memory"):
        cuda = draft.facts.machine.accelerator == "cuda"
        why = "pinned memory makes copies to the GPU asynchronous" if cuda else "there is no GPU to copy to"
        draft.put((ZERO, offload, "pin_memory"), cuda, why)
    ratio = (ZERO, offload, "ratio")
    if draft.is_open(*ratio) and not draft.facts.complete:
        draft.miss(ratio, _PLAN, "Write a number from 0 to 1.")
    nvme_path = (ZERO, offload, "nvme_path")
    if draft.is_open(*nvme_path) and draft.value(ZERO, offload, "device") == "nvme":
        draft.refuse(nvme_path, "auto cannot know a folder.", "Write a folder on a local NVMe drive.")


def _leave_offload_open(draft: Draft, offload: str) -> None:
    """Leave all open keys of an offload section open before a run, because its device is open."""
    for path in draft.still_open():
        if path[:2] == (ZERO, offload) and not draft.facts.complete:
            draft.miss(path, _PLAN, "Write a value.")


def _cap_bucket(draft: Draft) -> None:
    """Reduce an absent `reduce_bucket_size` to the size of the model: the rest of the buffer would be unused.

    DeepSpeed's default is larger. With all parameters in one bucket, the reductions are the same.
    """
    path, model = (ZERO, "reduce_bucket_size"), draft.facts.model
    if draft.get(*path) is None and not draft.is_open(*STAGE.path) and _stage(draft) and model and model.parameters:
        default, _ = _default("reduce_bucket_size")
        if model.parameters < default:
            draft.put(path, model.parameters, f"all parameters of the model; DeepSpeed's default is {int(default):,}")


def _settle_overlap(draft: Draft) -> None:
    """Settle `overlap_comm`: write out that DeepSpeed's null means stage 3 only.

    DeepSpeed refuses to start with it below stage 2. It changes speed and no result, so a typed true is turned off
    there and logged, not refused.
    """
    path = (ZERO, "overlap_comm")
    stage = _stage(draft)
    if draft.is_open(*STAGE.path):
        if draft.is_open(*path):
            draft.miss(path, _PLAN, "Write true or false.")
    elif draft.get(*path) is None:
        draft.put(path, stage == 3, "DeepSpeed overlaps communication at stage 3 only", "default")
    elif draft.value(*path) and stage < 2:
        draft.put(path, False, f"DeepSpeed cannot overlap communication at stage {stage} here; no number changes")
        typed = draft.get(*STAGE.path)
        if typed is None or not typed.origin.typed_by_user:  # otherwise the check of the configuration has warned
            draft.log(f"{ZERO}.overlap_comm: true has no effect at stage {stage}, DeepSpeed overlaps from stage 2 up.")


def _of_model(choose: Callable[[ModelFacts], tuple[int, str] | None], key: str) -> Rule:
    def rule(draft: Draft) -> tuple[int, str] | None:
        model = draft.facts.model
        return (model and choose(model)) or _default_of_run(draft, key)

    return rule


def _sub_group_size(draft: Draft) -> tuple[int, str] | None:
    """Return a tenth of the partition if `ratio` has to split sub-groups: with one group, it would have no effect."""
    model: ModelFacts | None = draft.facts.model
    if draft.is_missing(ZERO, "offload_optimizer", "ratio"):
        return None
    ratio = draft.value(ZERO, "offload_optimizer", "ratio", default=1.0)
    if ratio == 1:
        return _default("sub_group_size")
    if model is None or not model.parameters:
        return _default_of_run(draft, "sub_group_size")
    partition = model.parameters // draft.facts.machine.all_processes
    why = f"a tenth of one process's {partition:,} elements, so ratio {ratio:g} can split them"
    return max(1, partition // 10), why


def _swap_buffer(draft: Draft) -> tuple[int, str] | None:
    """Return the elements of one swap buffer, which has to hold the largest parameter."""
    model = draft.facts.model
    if model is None or not model.largest_parameter:
        return _default_of_run(draft, "offload_param.buffer_size")
    least, reason = _default("offload_param.buffer_size")
    if model.largest_parameter <= least:
        return least, f"{reason}, larger than every parameter"
    return model.largest_parameter, "the largest parameter has to fit"


def _kept_in_ram(draft: Draft) -> tuple[int, str]:
    """Return the number of parameter elements that stay in CPU memory under NVMe offload."""
    if draft.value(ZERO, "offload_param", "device") == "nvme":
        return 0, "device is nvme, so parameters go there (DeepSpeed's 1e9 would keep most models in RAM)"
    return _default("offload_param.max_in_cpu")


def _gather_on_save(draft: Draft) -> tuple[bool, str] | None:
    if draft.is_open(*STAGE.path):
        return None
    stage = _stage(draft)
    partitioned = "at stage 3 no process has unpartitioned weights"
    return stage == 3, partitioned if stage == 3 else "below stage 3 weights are not partitioned"


_RULES: Final[dict[str, Rule]] = {
    "reduce_bucket_size": _of_model(choose_bucket, "reduce_bucket_size"),
    "stage3_prefetch_bucket_size": _of_model(partial(choose_bucket, share=0.9), "stage3_prefetch_bucket_size"),
    "stage3_param_persistence_threshold": _of_model(choose_persistence_threshold, "stage3_param_persistence_threshold"),
    "sub_group_size": _sub_group_size,
    "stage3_gather_16bit_weights_on_model_save": _gather_on_save,
    "offload_param.buffer_size": _swap_buffer,
    "offload_param.max_in_cpu": _kept_in_ram,
}


def _default_of_run(draft: Draft, key: str) -> tuple[Any, str] | None:
    """Return DeepSpeed's default in a run. Before a run return None, because the model may give a better value."""
    return _default(key) if draft.facts.complete else None


def _default(key: str) -> tuple[Any, str]:
    found = deepspeed_default((ZERO, *key.split(".")))
    assert found is not None, key
    return found[0], "DeepSpeed's default"


def _stage(draft: Draft) -> int:
    return int(draft.value(*STAGE.path, default=0))


_SWITCHES: Final = tuple((half, "enabled") for half in _HALVES)

# The script sets these keys, also if they are absent: Accelerate reads an absent accumulation as 1, and DeepSpeed an
# absent clipping as 1.0. Both would override the script.
_THE_LOOPS: Final = tuple(key.path for key in TRAINING if key.filled_by == "loop")
# Keys that Accelerate 1.15 fills in `prepare`, or transformers 5.23 from TrainingArguments; they refuse other `auto`.
_FILLED_BY_SCRIPTS: Final = frozenset(key.path for key in TRAINING if key.filled_by in ("loop", "script"))


def config_for_scripts(document: Document, resolved: Resolved) -> dict[str, Any] | None:
    """Return a DeepSpeed configuration in which `auto` is left only for scripts of Accelerate or transformers to fill.

    Return None if the stage or an offload device waits for a plan, which needs the model. The configuration has the
    user's values, our values for every other `auto`, and all values found for ZeRO. Keys that keep our loop's contract
    with DeepSpeed's engine are left out, because these scripts have their own loop.

    Args:
        document: a document that requests ZeRO.
        resolved: the document, resolved as far as possible before a run.
    """
    if any(path in resolved.missing for path in PLACEMENT):
        return None
    values: dict[KeyPath, Any] = dict.fromkeys(_THE_LOOPS, AUTO)
    for path, entry in document.deepspeed.entries.items():
        if path == CLIPPING.path and entry.value is None:
            values[path] = 0.0  # null is "none" here, and 1.0 in DeepSpeed
        elif path in _THE_LOOPS and not entry.origin.typed_by_user:
            values[path] = AUTO  # chosen by a plan, which the script does not know
        elif entry.value is not None:
            values[path] = _value(path, entry.value, resolved.tree)
    for path, entry in resolved.tree.entries.items():
        if path not in values and (path[0] == ZERO or path[-1] == "torch_adam"):
            values[path] = _value(path, entry.value, resolved.tree)
    if resolved.zero_stage == 3:  # without this key Accelerate and the Trainer cannot save a model
        values.setdefault(keys.SAVE_16BIT.path, True)
    origin = Origin("rule", "for scripts")
    passed = Tree({p: Entry(v, origin) for p, v in values.items() if v is not None and is_passed_on(p, v)})
    of_accelerate = (SEQUENCE_KEY, "data_parallel_size")  # Accelerate takes them from variables
    return passed.where(lambda path, _: path[0] not in of_accelerate).nested(auto="auto")


def _value(path: KeyPath, asked: Any, resolved: Tree) -> Any:
    """Return the value to write at `path`; None leaves the key to DeepSpeed."""
    if path in _FILLED_BY_SCRIPTS and (asked is AUTO or (path not in _SWITCHES and not holds_auto(asked))):
        return asked
    found = resolved.value(*path)
    if not holds_auto(found):
        return found
    if path in DEEPSPEED_AUTO:
        return None  # "auto" is DeepSpeed's own default here, but Accelerate refuses it
    default = deepspeed_default(path, resolved.value("optimizer", "type"))
    return AUTO if default is None else default[0]
