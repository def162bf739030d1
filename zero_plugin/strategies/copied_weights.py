"""Compare the weights that each process holds as its own copy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_plugin.distributed.collectives import gather_values, is_same_on_all
from zero_plugin.distributed.differences import SHOWN, compare
from zero_plugin.errors import LoopError
from zero_plugin.tensors.modules import names_of

if TYPE_CHECKING:
    from zero_plugin.strategies.base import Session

# The relative difference that copies may have: perturbing and restoring a weight rounds differently.
_ROUNDING: Final = 1e-3


def summarize(weights: Sequence[nn.Parameter]) -> Tensor:
    """Return the norm and the sum of each weight, in turn, in fp32 on the device of the first weight."""
    values = [torch.view_as_real(p.detach()) if p.is_complex() else p.detach() for p in weights]
    numbers = [n for p in values for n in (torch.linalg.vector_norm(p), p.sum(dtype=torch.float32))]
    return torch.stack([number.to(numbers[0].device, torch.float32) for number in numbers])


def check_weights_to_save(session: Session | None) -> None:
    """Check that the processes have the same weights now: each saves a part of its own copy. Collective.

    Raises:
        LoopError: the weights differ, e.g. because one process wrote weights after the last step. A checkpoint would
            mix them.
    """
    if session is None or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    copies = session.copies_to_save()
    refuse_differences(session, copies, summarize(copies) if copies else None)


def refuse_differences(session: Session, copies: Sequence[nn.Parameter], summary: Tensor | None) -> None:
    """Refuse weights that were written on some processes only. Collective.

    Args:
        session: the session of the model.
        copies: the weights that each process holds as its own copy; may be empty.
        summary: the result of `summarize` for the copies; None if this process has taken none.

    Raises:
        LoopError: the weights differ, or the script has written partitioned weights on some processes only.
    """
    differences = _describe_copies(session.module, copies, summary) if copies else ""
    if differences := differences or _describe_written(session):
        raise LoopError(
            f"the weights of the {type(session.module).__name__} were written on some processes only, or not alike:\n"
            f"{differences}\n"
            "Load and write them on every process. Under `if accelerator.is_main_process:` only one copy changes, and "
            "the other processes continue with their old weights."
        )


def _describe_copies(module: nn.Module, weights: Sequence[nn.Parameter], summary: Tensor | None) -> str:
    # A process without a summary left out steps that the others skipped: nothing is compared with it.
    nothing = torch.full((2, 2 * len(weights)), -inf, device=weights[0].device)
    both = nothing if summary is None else torch.stack([summary, -summary])
    dist.all_reduce(both, dist.ReduceOp.MAX)
    largest, negated_smallest = both.view(2, -1, 2)  # the norm and the sum of each weight
    sizes = largest.abs().amax(1, keepdim=True)
    is_small = sizes[:, 0] <= _ROUNDING * sizes.max()
    differ = (largest + negated_smallest > _ROUNDING * sizes).any(1) & ~is_small
    found = names_of(module, (p for p, differs in zip(weights, differ.tolist(), strict=True) if differs))
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return f"  they differ: {', '.join(found[:SHOWN])}{more}" if found else ""


def _describe_written(session: Session) -> str:
    """Return the steps before which not all processes have written weights, if that had an effect."""
    own = session.take_written()
    if own is None or is_same_on_all(json.dumps(list(own))):  # only the steps: values always differ
        return ""
    everyone = [dict(written) for written in gather_values(list(own.items()))]
    partial = {step for written in everyone for step, has_changed in written.items() if has_changed}
    partial -= {step for step in partial if all(step in written for written in everyone)}
    steps = ", ".join(str(step) for step in sorted(own.keys() & partial)[:SHOWN])
    return compare({"before step": steps or "not written"})
