"""Fills every open field from facts: precision, batch sizes, ZeRO; the optimizer's and the scheduler's are beside it.

In a run, before one, and for scripts of other layers.
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
    """Fill every open field of `document` from `facts`; the document stays as it is.

    What a user typed keeps its origin. Everything else carries the reason of the rule that found it. Before a run, when
    the facts are not `complete`, the fields that it may still fill stay open, in the result's `missing`.

    Raises:
        ConfigError: listing every field that cannot be filled, and every value that contradicts the loop, the machine
            or another value.
    """
    draft = Draft(document, facts)
    settle_precision(draft)  # each topic may look at the ones before it
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
    """Every other open field repeats a value that is settled, or takes DeepSpeed's default, listed as such."""
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
    """Hold the document, with the stage and the devices that a plan has chosen, to the rules: open they broke none."""
    settled = {path: entry for path in (*PLACEMENT, *_SWITCHES) if (entry := draft.get(*path)) is not None}
    if draft.on_deepspeed and any(path in PLACEMENT and settled[path].origin.kind == "rule" for path in settled):
        planned = replace(draft.document, deepspeed=draft.document.deepspeed.replace(settled))
        for check in (*PRECISION, *STAGES, check_offload, *OPTIMIZING):
            for problem in check(Asked(planned)):
                if problem.severity == "error":
                    draft.add(problem)


def _check_found(draft: Draft) -> None:
    """Hold what the rules took from the loop to the same schema as what was typed."""
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
    """Return how many processes share each sample.

    Raises:
        ConfigError: the processes cannot be divided into groups of that many.
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
    """Resolve what can be without a loop and a model; what those tell stays open, in the result's `missing`.

    Args:
        document: checked.
        accelerator: what the workers will run on; a GPU is taken to compute in fp16 until a worker looks.
        processes: workers on all machines.
        strategy: what the document asks for.
        bf16: whether the device computes in bf16.

    Raises:
        ConfigError: problems that resolution will have whatever the script does: fp16 under DeepSpeed on a CPU, …
    """
    shared = check_sequence_groups(document, processes)
    groups = max(1, processes // shared)
    machine = MachineFacts(accelerator, groups, bf16, fp16=accelerator == "cuda", shared_by=shared)
    return resolve(document, Facts(machine=machine, strategy=strategy, complete=False))


_GLOBAL, _MICRO, _ACCUMULATION = (key.path for key in BATCH)


def settle_batch(draft: Draft) -> None:
    """Settle the three batch sizes, or refuse them with the arithmetic that does not work out."""
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
    elif settled_global != product and agreed:  # else this would advise on a micro-batch that is not the one to keep
        fix = f'Write {product} or "auto", or change one of the three factors.'
        draft.refuse(_GLOBAL, f"{settled_global} is not {_arithmetic(draft)} = {product}.", fix)


def _leave_batch_open(draft: Draft) -> None:
    """Before a run, without a loader: what its batch size would settle."""
    draft.miss(_MICRO, "training DataLoader to tell its batch size", "Prepare the training DataLoader.")
    if draft.get(*_ACCUMULATION) is None:
        if draft.get(*_GLOBAL) is None:
            draft.put(_ACCUMULATION, *_accumulation(draft))
        else:
            draft.miss(_ACCUMULATION, "micro batch to divide train_batch_size by", "Prepare the training DataLoader.")
    if draft.get(*_GLOBAL) is None:
        draft.miss(_GLOBAL, "micro batch to multiply", "Prepare the training DataLoader.")


def unplanned_micro_batch(total: int | None, steps: int | None, processes: int) -> tuple[int, str]:
    """Samples per process and backward, and why, where neither a loader nor a plan tells: what the global batch leaves.

    Args:
        total: the global batch; None where nobody wrote it.
        steps: micro-batches per optimizer step; None for 1.
        processes: data-parallel.
    """
    steps = steps or 1
    if total is not None and total >= steps * processes:
        reason = f"train_batch_size {total} ÷ ({steps} accumulation × {processes} processes)"
        return total // (steps * processes), reason
    return 1, (
        "no training loader tells its batch size, and no plan what fits: prepare the training DataLoader, or write a "
        "number; training does not depend on it, only DeepSpeed's speed report"
    )


def _was_planned(draft: Draft) -> bool:
    """Whether the micro-batch was chosen by a plan before the run, and a loader has come with another."""
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
    """Micro-batches per optimizer step: what the global batch asks for, else 1."""
    total, micro, world = draft.value(*_GLOBAL), draft.value(*_MICRO), draft.facts.machine.processes
    if total is not None and total > micro * world and total % (micro * world) == 0:
        return total // (micro * world), f"train_batch_size {total} ÷ ({micro} × {world} processes)"
    return 1, "neither code nor configuration sets accumulation"


def _agrees_with_loader(draft: Draft) -> bool:
    """Whether the loader has the settled micro-batch; if not that is refused, since the loader's would really run."""
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
    """Settle the clipping: 0, which is no clipping, is written out, since DeepSpeed clips at 1.0 by default."""
    if draft.get(*CLIPPING.path) is None:
        why = "none is configured; clip_grad_norm_ in the loop still clips"
        draft.put(CLIPPING.path, 0.0, why, logged=draft.is_open(*CLIPPING.path))


_HALVES: Final = ("fp16", "bf16")


def expected_precision(document: Document, machine: MachineFacts) -> str:
    """`no`, `fp16` or `bf16`: what a model that is prepared now will compute in."""
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
        elif section.value is not (half == precision) and by_flag:  # a flag is there to override the file
            draft.put((half, "enabled"), half == precision, f"{reason}, which overrides {section.origin.where}")
    if asked is None or asked.value is AUTO:
        draft.put_launch("mixed_precision", precision, reason, logged=asked is not None)
    _check_device(draft, precision)
    _check_settled(draft)
    if precision == "bf16" and draft.on_deepspeed and draft.is_unsettled("bf16", "check_grad_overflow"):
        draft.put(("bf16", "check_grad_overflow"), True, "a step with non-finite gradients is skipped", "default")


def _check_settled(draft: Draft) -> None:
    """Hold the precision, with its reason, to the rules that the document was held to before it was settled."""
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
    """The precision and why: what was asked, else the section that is on, else what the hardware has."""
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
        computes = f"a {machine.accelerator} device is taken to compute"  # until a worker looks
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


# A reduction of fewer elements than the floor is bound by latency, not bandwidth (h² is one million at h = 1024). Above
# the ceiling, DeepSpeed's own default, nothing gets faster and the buffer only takes memory.
_BUCKET_FLOOR: Final = 25_000_000
BUCKET_CEILING: Final = 500_000_000
# Gathering a tensor below the floor costs a collective and saves nothing; each one below the threshold stays
# unpartitioned on every device, so the ceiling bounds that.
_PERSISTENT_FLOOR: Final = 10_000
_PERSISTENT_CEILING: Final = 1_000_000


def choose_bucket(model: ModelFacts, share: float = 1.0) -> tuple[int, str] | None:
    """`share` × hidden² elements (transformers' rule), or the largest parameter; clamped, at most all of the model.

    Returns:
        Elements and the reason; None where the model tells nothing.
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
    """10 × hidden elements (transformers' rule): norms and biases stay unpartitioned; None without a hidden size."""
    if not model.hidden_size:
        return None
    wanted = 10 * model.hidden_size
    size = min(max(wanted, _PERSISTENT_FLOOR), _PERSISTENT_CEILING)
    clamped = "" if size == wanted else f", kept within {_PERSISTENT_FLOOR:,} to {_PERSISTENT_CEILING:,}"
    return size, f"10 × {model.hidden_size}, {model.hidden_size_reason}{clamped}"


_PLAN: Final = "plan of the memory, which needs the model"
# DeepSpeed's monitors that need a package: the section, what is imported, what to install.
_MONITORS: Final = (
    ("tensorboard", "tensorboard", "tensorboard"),
    ("wandb", "wandb", "wandb"),
    ("comet", "comet_ml", "comet_ml>=3.41.0"),
)
_OFFLOADS: Final[tuple[Literal["offload_optimizer", "offload_param"], ...]] = ("offload_optimizer", "offload_param")

Rule = Callable[[Draft], tuple[Any, str] | None]  # None: the model would tell, and a run will bring it


def settle_zero(draft: Draft) -> None:
    """Settle the stage, the offload devices, and every key of the section that depends on them or on the model."""
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
    """Write the keys without which DeepSpeed's engine would break the loop contract, or change with its release."""
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
    if draft.is_open(*STAGE.path):  # before a run
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
# Each is without effect where one before it is off.
_DROPPING: Final[tuple[KeyPath, ...]] = (
    ("data_efficiency", "enabled"),
    ("data_efficiency", "data_routing", "enabled"),
    ("data_efficiency", "data_routing", "random_ltd", "enabled"),
)


def _check_needs(draft: Draft) -> None:
    """What the engine needs of this run: a GPU, also where the device was chosen by default, a number of processes, and
    packages that DeepSpeed's monitors import on rank 0 alone, where the others would wait for it."""
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
    """Off DeepSpeed nothing of the section runs: an open stage or device is none, so that nobody is misled."""
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
    """Before a run: nothing of the section is known as long as its device is not."""
    for path in draft.still_open():
        if path[:2] == (ZERO, offload) and not draft.facts.complete:
            draft.miss(path, _PLAN, "Write a value.")


def _cap_bucket(draft: Draft) -> None:
    """An absent `reduce_bucket_size`: of DeepSpeed's default as much as the model fills; the rest is reserved in vain.

    With all parameters in one bucket the reductions are the same.
    """
    path, model = (ZERO, "reduce_bucket_size"), draft.facts.model
    if draft.get(*path) is None and not draft.is_open(*STAGE.path) and _stage(draft) and model and model.parameters:
        default, _ = _default("reduce_bucket_size")
        if model.parameters < default:
            draft.put(path, model.parameters, f"all parameters of the model; DeepSpeed's default is {int(default):,}")


def _settle_overlap(draft: Draft) -> None:
    """`overlap_comm`: DeepSpeed's "null means stage 3" written out; below stage 2 the engine refuses to start with it.

    It changes speed and no number, so a typed true is turned off there, and logged, rather than refused.
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
        if typed is None or not typed.origin.typed_by_user:  # else the check of the configuration has said it
            draft.log(f"{ZERO}.overlap_comm: true has no effect at stage {stage}, DeepSpeed overlaps from stage 2 up.")


def _of_model(choose: Callable[[ModelFacts], tuple[int, str] | None], key: str) -> Rule:
    def rule(draft: Draft) -> tuple[int, str] | None:
        model = draft.facts.model
        return (model and choose(model)) or _default_of_run(draft, key)

    return rule


def _sub_group_size(draft: Draft) -> tuple[int, str] | None:
    """A tenth of the partition where `ratio` splits the sub-groups: with one group a ratio below 1 has no effect."""
    model: ModelFacts | None = draft.facts.model
    if draft.is_missing(ZERO, "offload_optimizer", "ratio"):
        return None
    ratio = draft.value(ZERO, "offload_optimizer", "ratio", default=1.0)
    if ratio == 1:
        return _default("sub_group_size")
    if model is None or not model.parameters:
        return _default_of_run(draft, "sub_group_size")
    partition = model.parameters // draft.facts.machine.all_processes
    why = f"a tenth of one process's {partition:,} elements, so that ratio {ratio:g} can split them"
    return max(1, partition // 10), why


def _swap_buffer(draft: Draft) -> tuple[int, str] | None:
    """Elements of one swap buffer: the largest parameter has to fit."""
    model = draft.facts.model
    if model is None or not model.largest_parameter:
        return _default_of_run(draft, "offload_param.buffer_size")
    least, reason = _default("offload_param.buffer_size")
    if model.largest_parameter <= least:
        return least, f"{reason}, larger than every parameter"
    return model.largest_parameter, "the largest parameter has to fit"


def _kept_in_ram(draft: Draft) -> tuple[int, str]:
    """Elements of the parameters that stay in RAM under NVMe offload."""
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
    """DeepSpeed's default for a model that tells nothing; before a run nothing, since its model may."""
    return _default(key) if draft.facts.complete else None


def _default(key: str) -> tuple[Any, str]:
    found = deepspeed_default((ZERO, *key.split(".")))
    assert found is not None, key
    return found[0], "DeepSpeed's default"


def _stage(draft: Draft) -> int:
    return int(draft.value(*STAGE.path, default=0))


_SWITCHES: Final = tuple((half, "enabled") for half in _HALVES)

# What only the loop knows is the script's, also if it is absent: Accelerate takes an absent accumulation for 1,
# DeepSpeed an absent clipping for 1.0, and both would win over the script.
_THE_LOOPS: Final = tuple(key.path for key in TRAINING if key.filled_by == "loop")
# What Accelerate 1.15 fills in `prepare`, or transformers 5.23 from TrainingArguments; at another `auto` they stop.
_FILLED_BY_SCRIPTS: Final = frozenset(key.path for key in TRAINING if key.filled_by in ("loop", "script"))


def config_for_scripts(document: Document, resolved: Resolved) -> dict[str, Any] | None:
    """A DeepSpeed configuration in which `auto` is only where such a script fills it; None as long as the plan that
    would choose the stage, or where to offload, waits for the model.

    It is what the user wrote, with our value for every other `auto`, and with all that was found for ZeRO. What this
    package sets so that DeepSpeed's engine keeps our loop's contract is left out: such a script has another one.

    Args:
        document: what was configured, with ZeRO.
        resolved: the same, resolved as far as it can be before a run.
    """
    if any(path in resolved.missing for path in PLACEMENT):
        return None
    values: dict[KeyPath, Any] = dict.fromkeys(_THE_LOOPS, AUTO)
    for path, entry in document.deepspeed.entries.items():
        if path == CLIPPING.path and entry.value is None:
            values[path] = 0.0  # null is "none" here, and 1.0 in DeepSpeed
        elif path in _THE_LOOPS and not entry.origin.typed_by_user:
            values[path] = AUTO  # a plan's, which the script does not know
        elif entry.value is not None:
            values[path] = _value(path, entry.value, resolved.tree)
    for path, entry in resolved.tree.entries.items():
        if path not in values and (path[0] == ZERO or path[-1] == "torch_adam"):
            values[path] = _value(path, entry.value, resolved.tree)
    if resolved.zero_stage == 3:  # without it Accelerate and the Trainer cannot save a model
        values.setdefault(keys.SAVE_16BIT.path, True)
    origin = Origin("rule", "for scripts")
    passed = Tree({p: Entry(v, origin) for p, v in values.items() if v is not None and is_passed_on(p, v)})
    of_accelerate = (SEQUENCE_KEY, "data_parallel_size")  # which takes them from variables
    return passed.where(lambda path, _: path[0] not in of_accelerate).nested(auto="auto")


def _value(path: KeyPath, asked: Any, resolved: Tree) -> Any:
    """The value to write at `path`; None leaves the key to DeepSpeed."""
    if path in _FILLED_BY_SCRIPTS and (asked is AUTO or (path not in _SWITCHES and not holds_auto(asked))):
        return asked
    found = resolved.value(*path)
    if not holds_auto(found):
        return found
    if path in DEEPSPEED_AUTO:
        return None  # DeepSpeed's own word, and its default, at which Accelerate stops
    default = deepspeed_default(path, resolved.value("optimizer", "type"))
    return AUTO if default is None else default[0]
