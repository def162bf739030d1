"""DeepSpeed's CPU Adam, brought to where it stands after the steps that its states have."""

from __future__ import annotations

from typing import Any, Final

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

__all__ = ["replay_bias_correction"]

_NEGLIGIBLE: Final = 2.0**-26  # 1 - βᵗ is 1 in fp32 from there on, however βᵗ was computed


def replay_bias_correction(optimizer: Any) -> None:
    """Take the steps of the states again, on one element that nobody has.

    The kernel multiplies βᵗ on from step to step, but begins with a power where the step is not the next one, as after
    loading: another number in the last place, so that a run that was interrupted would not be the same run bitwise.

    Args:
        optimizer: any; nothing is done for others.
    """
    if not isinstance(optimizer, DeepSpeedCPUAdam):
        return
    steps = max((int(state.get("step", 0)) for state in optimizer.state.values()), default=0)
    groups = optimizer.param_groups
    if max(max(group["betas"]) ** steps for group in groups) < _NEGLIGIBLE:
        return
    nobody = [torch.zeros(1) for _ in range(4)]
    for step in range(1, steps + 1):
        for group in groups:  # the kernel has one βᵗ for all of them, and a power again where β changes between them
            betas = group["betas"]
            optimizer.ds_opt_adam.adam_update(
                optimizer.opt_id, step, 0.0, *betas, 1.0, 0.0, group["bias_correction"], *nobody
            )
