"""Runs a module's forwards under autocast, so that its weights stay fp32 and its operations are 16 bits wide."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import nn

from zero_plugin.nested import map_leaves, to_fp32
from zero_plugin.plugins import AutocastKwargs

__all__ = ["autocast_as", "run_under_autocast"]

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_as(precision: str, device_type: str, handler: AutocastKwargs | None) -> AbstractContextManager[Any]:
    """`torch.autocast` to the type of `precision`; nothing for `no`."""
    if precision == "no":
        return nullcontext()
    return torch.autocast(device_type, _TYPES[precision], **({} if handler is None else handler.to_kwargs()))


def run_under_autocast(module: nn.Module, autocast: Callable[[], AbstractContextManager[Any]]) -> Callable[[], None]:
    """From now on `module.forward` runs under `autocast` and returns fp32.

    Its signature stays, which transformers reads, and a copy of the module computes with the copy's weights.

    Returns:
        What takes it back.
    """
    own = module.__dict__.get("forward")  # one that the script, or a library, has set on this object

    def under_autocast(forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def autocast_forward(*args: Any, **kwargs: Any) -> Any:
            with autocast():
                outputs = forward(*args, **kwargs)
            return map_leaves(to_fp32, outputs)

        return autocast_forward

    placed: Callable[..., Any]
    if own is None:
        placed = MethodType(under_autocast(type(module).forward), module)  # copying a module binds its methods anew
    elif isinstance(own, MethodType) and own.__self__ is module:
        placed = MethodType(under_autocast(own.__func__), module)
    else:
        placed = under_autocast(own)
    module.forward = placed

    def undo() -> None:
        if module.__dict__.get("forward") is not placed:
            return  # what was put around it since then
        if own is None:
            del module.forward
        else:
            module.forward = own

    return undo
