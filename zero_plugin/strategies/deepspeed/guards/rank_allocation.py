"""Refuses AdaLoRA's allocation of ranks, which reads gradients after the step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from torch import nn

from zero_plugin.errors import LoopError


def refuse_rank_allocation(model: nn.Module) -> list[Callable[[], Any]]:
    """Make `update_and_allocate` of PEFT's AdaLoRA an error: it reads `p.grad` after the step, and writes into weights.

    Returns:
        What takes this back.
    """

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise LoopError(
            "update_and_allocate() of AdaLoRA reads p.grad after optimizer.step() and writes into the adapters: under "
            "ZeRO p.grad is gone by then.\nTrain AdaLoRA without DeepSpeed (distributed_type: MULTI_GPU), or use LoRA, "
            "which trains at every stage. Without update_and_allocate() AdaLoRA keeps the ranks that it begins with."
        )

    undo: list[Callable[[], Any]] = []
    for module in model.modules():
        if callable(getattr(type(module), "update_and_allocate", None)):
            module.__dict__["update_and_allocate"] = refuse
            undo.append(partial(module.__dict__.pop, "update_and_allocate", None))
    return undo
