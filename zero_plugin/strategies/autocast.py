"""Runs a module's forwards under autocast, so that its weights stay fp32 and its operations are 16 bits wide."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from zero_plugin.nested import map_leaves, to_fp32
from zero_plugin.plugins import AutocastKwargs
from zero_plugin.strategies.forwards import wrap_forward

__all__ = ["autocast_as", "run_under_autocast"]

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_as(precision: str, device_type: str, handler: AutocastKwargs | None) -> AbstractContextManager[Any]:
    """`torch.autocast` to the type of `precision`; nothing for `no`."""
    if precision == "no":
        return nullcontext()
    return torch.autocast(device_type, _TYPES[precision], **({} if handler is None else handler.to_kwargs()))


def run_under_autocast(module: nn.Module, autocast: Callable[[], AbstractContextManager[Any]]) -> Callable[[], None]:
    """From now on `module.forward` runs under `autocast` and returns fp32; what is returned takes it back."""

    def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with autocast():
            outputs = forward(*args, **kwargs)
        return map_leaves(to_fp32, outputs)

    return wrap_forward(module, run)
