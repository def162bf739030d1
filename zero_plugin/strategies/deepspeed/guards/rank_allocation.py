"""Refuse AdaLoRA's allocation of ranks, which reads gradients after the step."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from zero_plugin.errors import LoopError
from zero_plugin.strategies.deepspeed.patches import Patches


def refuse_rank_allocation(model: nn.Module, patches: Patches) -> None:
    """Make `update_and_allocate` of PEFT's AdaLoRA raise: it reads `p.grad` after the step and writes weights."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise LoopError(
            "update_and_allocate() of AdaLoRA reads p.grad after optimizer.step() and writes into the adapters: under "
            "ZeRO p.grad is gone by then.\nTrain AdaLoRA without DeepSpeed (distributed_type: MULTI_GPU), or use LoRA, "
            "which trains at every stage. Without update_and_allocate() AdaLoRA keeps its initial ranks."
        )

    for module in model.modules():
        if callable(getattr(type(module), "update_and_allocate", None)):
            patches.replace(module, "update_and_allocate", refuse)
