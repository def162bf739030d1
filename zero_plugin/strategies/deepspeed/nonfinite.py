"""Finds the parameter whose gradient made an engine skip its step."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.utils import safe_get_full_grad

from zero_plugin.strategies.loss_scale import DEFAULT_MOST_SKIPS, most_skips

__all__ = ["allowed_skips", "first_nonfinite"]


def first_nonfinite(engine: Any) -> str | None:
    """Name of the first parameter with a gradient that is not finite, before the step; None if none is found.

    Collective: partitioned gradients are gathered one parameter at a time.
    """
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            gradient = safe_get_full_grad(parameter)
            if gradient is not None and not torch.isfinite(gradient).all():
                return str(name)
    return None


def allowed_skips(engine: Any) -> int:
    """After how many skipped steps in a row the run stops; DeepSpeed's own exception at the smallest scale is off."""
    if not (engine.fp16_enabled() and engine.dynamic_loss_scale()):
        return DEFAULT_MOST_SKIPS
    if (scaler := getattr(engine.optimizer, "loss_scaler", None)) is not None:
        scaler.raise_error_at_min_scale = False
    fp16 = engine._config.float16_config
    return most_skips(fp16.initial_dynamic_scale(), fp16.min_loss_scale, fp16.hysteresis)
