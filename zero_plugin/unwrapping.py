"""Take a model out of what it was wrapped into: DDP, a DeepSpeed engine, `torch.compile`, a 16-bit forward."""

from __future__ import annotations

import copy
import sys
from types import MethodType
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from zero_plugin.compilation import is_compiled_module

__all__ = ["bare_copy", "extract_model"]


def extract_model(
    model: nn.Module, *, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """The model inside DDP, DataParallel or an engine.

    Args:
        model: wrapped, or not.
        keep_fp32_wrapper: leave its forward as it is; else the class' own comes back, so that it can be pickled.
        keep_torch_compile: of a compiled model, give the compiled one, with the inner model inside.
        recursive: take submodules out of theirs too.
    """
    compiled = model if "_orig_mod" in model.__dict__ or is_compiled_module(model) else None
    inner: Any = model if compiled is None else compiled._orig_mod
    wrappers = _wrappers()
    while isinstance(inner, wrappers):
        inner = inner.module
    if recursive:
        inner = _unwrap_children(inner)
    if not keep_fp32_wrapper:
        _restore_forward(inner)
    if compiled is None or not keep_torch_compile:
        return inner  # type: ignore[no-any-return]
    if is_compiled_module(compiled):
        compiled._orig_mod = inner
    else:
        compiled.__dict__["_orig_mod"] = inner
    return compiled


def bare_copy(model: nn.Module) -> nn.Module:
    """A module with the same parameters and submodules and its class' own forward, not compiled; e.g. to pickle it."""
    twin = copy.copy(model)  # without what `Module.compile` made of its calls
    _set_forward(twin, _own_forward(twin))
    return twin


def _wrappers() -> tuple[Any, ...]:
    engine = getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", None)  # no engine before deepspeed is imported
    return (DistributedDataParallel, DataParallel, *([engine] if engine is not None else []))


def _unwrap_children(module: Any) -> Any:
    while isinstance(getattr(module, "module", None), nn.Module):
        module = module.module
    for name, child in module.named_children():
        setattr(module, name, _unwrap_children(child))
    return module


def _restore_forward(model: nn.Module) -> None:
    """Put back the model's own forward in place of one that decorators made of it, each with its `__wrapped__`."""
    model.__dict__.pop("_original_forward", None)
    _set_forward(model, _own_forward(model))


def _own_forward(model: nn.Module) -> Any:
    """The forward that was set on this object, out of what decorators made of it; None where that is the class'."""
    forward: Any = model.__dict__.get("forward")
    bound = False
    while forward is not None:
        bound |= isinstance(forward, MethodType)
        function = getattr(forward, "__func__", forward)
        if function is type(model).forward:
            return None
        if not hasattr(function, "__wrapped__"):
            return MethodType(function, model) if bound else forward
        forward = function.__wrapped__
    return None


def _set_forward(model: nn.Module, forward: Any) -> None:
    model.__dict__.pop("forward", None)
    if forward is not None:
        model.__dict__["forward"] = forward
