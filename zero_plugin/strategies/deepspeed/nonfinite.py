"""Finds the parameter whose gradient made an engine skip its step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from zero_plugin.strategies.deepspeed.gradients import EngineGradients
from zero_plugin.strategies.precision import DEFAULT_MOST_SKIPS, most_skips


def first_nonfinite(engine: Any, gradients: EngineGradients) -> str | None:
    """Name of the first parameter with a gradient that is not finite, before the step; None if none is found.

    Each process looks at what it holds; one collective, whatever the number of parameters.
    """
    named = list(engine.module.named_parameters())
    found = torch.zeros(len(named), dtype=torch.int32, device=engine.device)
    for index, (_, parameter) in enumerate(named):
        gradient = gradients.held(parameter)
        if gradient is not None:
            found[index] = ~torch.isfinite(gradient).all()
    dist.all_reduce(found, dist.ReduceOp.MAX)
    indices = found.nonzero().flatten().tolist()
    return str(named[indices[0]][0]) if indices else None


def allowed_skips(engine: Any) -> int:
    """After how many skipped steps in a row the run stops; DeepSpeed's own exception at the smallest scale is off."""
    if not (engine.fp16_enabled() and engine.dynamic_loss_scale()):
        return DEFAULT_MOST_SKIPS
    if (scaler := getattr(engine.optimizer, "loss_scaler", None)) is not None:
        scaler.raise_error_at_min_scale = False
    fp16 = engine._config.float16_config
    return most_skips(fp16.initial_dynamic_scale(), fp16.min_loss_scale, fp16.hysteresis)
