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
    forward = twin.__dict__.pop("forward", None)
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    if isinstance(forward, MethodType) and forward.__func__ is not type(twin).forward:  # a replacement of the user's
        twin.__dict__["forward"] = MethodType(forward.__func__, twin)
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
    forward: Any = model.__dict__.get("forward")
    while hasattr(forward, "__wrapped__") and getattr(forward, "__self__", None) is not model:
        forward = forward.__wrapped__
    if getattr(forward, "__self__", None) is model:
        model.__dict__.pop("forward", None)
        if forward.__func__ is not type(model).forward:  # a replacement of the user's
            model.__dict__["forward"] = forward
