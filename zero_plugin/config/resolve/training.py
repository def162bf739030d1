"""Resolves batch sizes and precision.

Batch arithmetic: train_batch_size = micro batch × accumulation × processes, whichever of them are open.

Reconciles `mixed_precision` with the `fp16` and `bf16` sections, and with what the device can do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Literal

from zero_plugin.config.document import Document
from zero_plugin.config.resolve.draft import Draft
from zero_plugin.config.resolve.facts import Facts, MachineFacts
from zero_plugin.config.rules.asked import Asked
from zero_plugin.config.rules.training import check_one_precision, check_precision
from zero_plugin.config.tree import AUTO, Entry, KeyPath

_GLOBAL: KeyPath = ("train_batch_size",)
MICRO_BATCH: Final[KeyPath] = ("train_micro_batch_size_per_gpu",)
_ACCUMULATION: KeyPath = ("gradient_accumulation_steps",)


def settle_batch(draft: Draft) -> None:
    """Settle the three batch sizes, or refuse them with the arithmetic that does not work out."""
    settled_global = draft.value(*_GLOBAL)
    if draft.get(*MICRO_BATCH) is None or _was_planned(draft):
        if draft.facts.loop.micro_batch is not None:
            _put_loaders(draft)
        elif not draft.put_planned(MICRO_BATCH):
            if not draft.facts.complete:
                _leave_open(draft)
                return
            processes = draft.facts.machine.processes
            draft.put(MICRO_BATCH, *unplanned_micro_batch(settled_global, draft.value(*_ACCUMULATION), processes))
    agreed = _agrees_with_loader(draft)
    if draft.get(*_ACCUMULATION) is None:
        steps, reason = _accumulation(draft)
        draft.put(_ACCUMULATION, steps, reason, logged=steps > 1)
    product = draft.value(*MICRO_BATCH) * draft.value(*_ACCUMULATION) * draft.facts.machine.processes
    if settled_global is None:
        draft.put(_GLOBAL, product, _arithmetic(draft))
    elif settled_global != product and agreed:  # else this would advise on a micro-batch that is not the one to keep
        draft.refuse(
            _GLOBAL,
            f"{settled_global} is not {_arithmetic(draft)} = {product}.",
            f'Write {product} or "auto", or change one of the three factors.',
        )


def _leave_open(draft: Draft) -> None:
    """Before a run, without a loader: what its batch size would settle."""
    draft.miss(MICRO_BATCH, "training DataLoader to tell its batch size", "Prepare the training DataLoader.")
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
        return total // (
            steps * processes
        ), f"train_batch_size {total} ÷ ({steps} accumulation × {processes} processes)"
    return 1, (
        "no training loader tells its batch size, and no plan what fits: prepare the training DataLoader, or write a "
        "number; training does not depend on it, only DeepSpeed's speed report"
    )


def _was_planned(draft: Draft) -> bool:
    """Whether the micro-batch was chosen by a plan before the run, and a loader has come with another."""
    entry, loop = draft.get(*MICRO_BATCH), draft.facts.loop
    return not (entry is None or entry.origin.typed_by_user or loop.micro_batch in (None, entry.value))


def _put_loaders(draft: Draft) -> None:
    """Take the loader's, and say where a plan was made for another: before the run, or before the loader came."""
    loop, planned = draft.facts.loop, draft.facts.planned.get(MICRO_BATCH)
    before = draft.value(*MICRO_BATCH, default=planned[0] if planned else loop.micro_batch)
    if before != loop.micro_batch:
        draft.say(
            f"the plan was made for {before} samples per process; the loop trains on {loop.micro_batch} "
            f"({loop.micro_batch_reason})"
        )
    draft.put(MICRO_BATCH, loop.micro_batch, loop.micro_batch_reason)


def _accumulation(draft: Draft) -> tuple[int, str]:
    """Micro-batches per optimizer step: what the global batch asks for, else 1."""
    total, micro, world = draft.value(*_GLOBAL), draft.value(*MICRO_BATCH), draft.facts.machine.processes
    if total is not None and total > micro * world and total % (micro * world) == 0:
        return total // (micro * world), f"train_batch_size {total} ÷ ({micro} × {world} processes)"
    return 1, "neither code nor configuration sets accumulation"


def _agrees_with_loader(draft: Draft) -> bool:
    """Whether the loader has the settled micro-batch; if not that is refused, since the loader's would really run."""
    loop = draft.facts.loop
    typed = draft.value(*MICRO_BATCH)
    if loop.micro_batch is None or not loop.micro_batch_fixed or loop.micro_batch == typed:
        return True
    draft.refuse(
        MICRO_BATCH,
        f"{typed}, but the loop trains on {loop.micro_batch} ({loop.micro_batch_reason}).",
        f'Write {loop.micro_batch} or "auto", or build the DataLoader with batch_size={typed}.',
    )
    return False


def _arithmetic(draft: Draft) -> str:
    micro, steps = draft.value(*MICRO_BATCH), draft.value(*_ACCUMULATION)
    return f"{micro} (micro batch) × {steps} (accumulation) × {draft.facts.machine.processes} (processes)"


def settle_clipping(draft: Draft) -> None:
    """Settle `gradient_clipping`; 0 is DeepSpeed's "none", and its own default became 1.0 in 0.19.3."""
    path = ("gradient_clipping",)
    if draft.get(*path) is None:
        why = "none is configured; clip_grad_norm_ in the loop still clips"
        draft.put(path, 0.0, why, logged=draft.is_open(*path))


Half = Literal["fp16", "bf16"]
_HALVES: tuple[Half, Half] = ("fp16", "bf16")
_LEGAL = "Write one of: no, fp16, bf16, auto."


def expected_precision(document: Document, machine: MachineFacts) -> str:
    """`no`, `fp16` or `bf16`: what a model that is prepared now will compute in."""
    draft = Draft(document, Facts(machine=machine))
    return _choose(_asked(draft), _typed(draft), draft.facts)[0]


def settle_precision(draft: Draft) -> None:
    """Settle `mixed_precision`, `fp16.enabled` and `bf16.enabled` to one precision, then check it."""
    asked = _asked(draft)
    if asked is not None and asked.value is not AUTO and asked.value not in ("no", *_HALVES):
        draft.refuse(("mixed_precision",), f"{asked.value!r} is not a precision of this package.", _LEGAL)
        return
    typed = _typed(draft)
    precision, reason = _choose(asked, typed, draft.facts)
    by_flag = asked is not None and asked.value is not AUTO and asked.origin.kind == "flag"
    for half, section in typed.items():
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
    check = check_precision if draft.on_deepspeed else check_one_precision
    for problem in check(Asked(replace(draft.document, launch=draft.launch, deepspeed=draft.tree))):
        if problem.severity == "error":
            draft.add(problem)
        elif was_open:
            draft.say(f"{problem.key} = {problem.value} {problem.message}.")


def _asked(draft: Draft) -> Entry | None:
    asked = draft.launch.get("mixed_precision")
    return None if asked is None or asked.value is None else asked


def _typed(draft: Draft) -> dict[Half, Entry | None]:
    """Of each half precision, whether it is written to be on or off."""
    return {half: draft.get(half, "enabled") for half in _HALVES}


def _choose(asked: Entry | None, typed: dict[Half, Entry | None], facts: Facts) -> tuple[str, str]:
    """The precision and why: what was asked, else the section that is on, else what the hardware has."""
    if asked is not None and asked.value is not AUTO:
        return asked.value, f"mixed_precision is {asked.value} ({asked.origin.where})"
    for half, entry in typed.items():
        if entry is not None and entry.value is True:
            return half, f"{half}.enabled is true ({entry.origin.where})"
    if asked is None:
        return "no", "mixed_precision is not given"
    machine, ruled_out = facts.machine, {half for half, entry in typed.items() if entry is not None}
    computes = f"this {machine.accelerator} computes"
    if not facts.complete:
        computes = f"a {machine.accelerator} device is taken to compute"  # until a worker looks
    if machine.bf16 and "bf16" not in ruled_out:
        return "bf16", f"mixed_precision is auto and {computes} in bf16"
    if machine.fp16 and "fp16" not in ruled_out:
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
        draft.say(f"bf16 is on, but this {machine.accelerator} device has no bf16 arithmetic: it is emulated and slow.")
