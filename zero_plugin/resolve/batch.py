"""Batch arithmetic: train_batch_size = micro batch × accumulation × processes, whichever of them are open."""

from __future__ import annotations

from typing import Final

from zero_plugin.config.tree import Path
from zero_plugin.resolve.draft import Draft

__all__ = ["MICRO_BATCH", "settle_batch", "settle_clipping", "unplanned_micro_batch"]

_GLOBAL: Path = ("train_batch_size",)
MICRO_BATCH: Final[Path] = ("train_micro_batch_size_per_gpu",)
_ACCUMULATION: Path = ("gradient_accumulation_steps",)


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
        draft.put(_ACCUMULATION, steps, reason, aloud=steps > 1)
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
    return 1, "neither code nor configuration asks for accumulation"


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
        why = "none is asked for; clip_grad_norm_ in the loop still clips"
        draft.put(path, 0.0, why, aloud=draft.is_open(*path))
