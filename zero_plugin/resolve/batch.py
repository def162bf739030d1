"""Batch arithmetic: train_batch_size = micro batch × accumulation × processes, whichever of them are open."""

from __future__ import annotations

from zero_plugin.config.tree import Path
from zero_plugin.resolve.draft import Draft

__all__ = ["settle_batch", "settle_clipping"]

_GLOBAL: Path = ("train_batch_size",)
_MICRO: Path = ("train_micro_batch_size_per_gpu",)
_ACCUMULATION: Path = ("gradient_accumulation_steps",)


def settle_batch(draft: Draft) -> None:
    """Settle the three batch sizes, or refuse them with the arithmetic that does not work out."""
    settled_global = draft.value(*_GLOBAL)
    if draft.get(*_MICRO) is None or _was_planned(draft):
        if draft.facts.loop.micro_batch is None and not draft.facts.complete and _MICRO not in draft.facts.planned:
            _leave_open(draft)
            return
        draft.put(_MICRO, *_micro_batch(draft))
    agreed = _agrees_with_loader(draft)
    if draft.get(*_ACCUMULATION) is None:
        steps, reason = _accumulation(draft)
        draft.put(_ACCUMULATION, steps, reason, aloud=steps > 1)
    product = draft.value(*_MICRO) * draft.value(*_ACCUMULATION) * draft.facts.machine.processes
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
    draft.miss(_MICRO, "training DataLoader to tell its batch size", "Prepare the training DataLoader.")
    if draft.get(*_ACCUMULATION) is None:
        if draft.get(*_GLOBAL) is None:
            draft.put(_ACCUMULATION, *_accumulation(draft))
        else:
            draft.miss(_ACCUMULATION, "micro batch to divide train_batch_size by", "Prepare the training DataLoader.")
    if draft.get(*_GLOBAL) is None:
        draft.miss(_GLOBAL, "micro batch to multiply", "Prepare the training DataLoader.")


def _micro_batch(draft: Draft) -> tuple[int, str]:
    """Samples per process and backward: the loader's, else the plan's, else what the global batch leaves, else 1."""
    loop, world = draft.facts.loop, draft.facts.machine.processes
    total, steps = draft.value(*_GLOBAL), draft.value(*_ACCUMULATION, default=1)
    if loop.micro_batch is not None:
        return loop.micro_batch, loop.micro_batch_reason
    if _MICRO in draft.facts.planned:
        return draft.facts.planned[_MICRO]
    if total is not None and total >= steps * world:
        return total // (steps * world), f"train_batch_size {total} ÷ ({steps} accumulation × {world} processes)"
    return 1, "no training loader tells its batch size; training does not depend on it, only DeepSpeed's speed report"


def _was_planned(draft: Draft) -> bool:
    """Whether the micro-batch was chosen by a plan before the run, and a loader has come with another."""
    entry, loop = draft.get(*_MICRO), draft.facts.loop
    if entry is None or entry.origin.typed_by_user or loop.micro_batch in (None, entry.value):
        return False
    draft.say(
        f"the plan was made for {entry.value} samples per process; the loop trains on {loop.micro_batch} "
        f"({loop.micro_batch_reason})"
    )
    return True


def _accumulation(draft: Draft) -> tuple[int, str]:
    """Micro-batches per optimizer step: what the global batch asks for, else 1."""
    total, micro, world = draft.value(*_GLOBAL), draft.value(*_MICRO), draft.facts.machine.processes
    if total is not None and total > micro * world and total % (micro * world) == 0:
        return total // (micro * world), f"train_batch_size {total} ÷ ({micro} × {world} processes)"
    return 1, "neither code nor configuration asks for accumulation"


def _agrees_with_loader(draft: Draft) -> bool:
    """Whether the loader has the settled micro-batch; if not that is refused, since the loader's would really run."""
    loop = draft.facts.loop
    typed = draft.value(*_MICRO)
    if loop.micro_batch is None or not loop.micro_batch_fixed or loop.micro_batch == typed:
        return True
    draft.refuse(
        _MICRO,
        f"{typed}, but the loop trains on {loop.micro_batch} ({loop.micro_batch_reason}).",
        f'Write {loop.micro_batch} or "auto", or build the DataLoader with batch_size={typed}.',
    )
    return False


def _arithmetic(draft: Draft) -> str:
    micro, steps = draft.value(*_MICRO), draft.value(*_ACCUMULATION)
    return f"{micro} (micro batch) × {steps} (accumulation) × {draft.facts.machine.processes} (processes)"


def settle_clipping(draft: Draft) -> None:
    """Settle `gradient_clipping`; 0 is DeepSpeed's "none", and its own default became 1.0 in 0.19.3."""
    path = ("gradient_clipping",)
    if draft.get(*path) is None:
        why = "none is asked for; clip_grad_norm_ in the loop still clips"
        draft.put(path, 0.0, why, aloud=draft.is_open(*path))
