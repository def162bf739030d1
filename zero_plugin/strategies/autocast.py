"""Runs a module's forwards under autocast, so that its weights stay fp32 and its operations are 16 bits wide."""

from __future__ import annotations

import warnings
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
    """From now on `module.forward` runs under `autocast` and returns fp32; what is returned takes it back.

    Another method of the module, which calls its submodules past that, computes in fp32: warned of where it is trained.
    """
    watch = _Watch(module)

    def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        watch.depth += 1
        try:
            with autocast():
                outputs = forward(*args, **kwargs)
        finally:
            watch.depth -= 1
        return map_leaves(to_fp32, outputs)

    unwrap = wrap_forward(module, run)

    def undo() -> None:
        watch.remove()
        unwrap()

    return undo


class _Watch:
    """Warns once where a part of a module is called from outside of the module's forward.

    A copy of the module, or one that was pickled, is not watched.

    Args:
        module: None where there is nothing to watch.

    Attributes:
        depth: of the module's forwards that run.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self.depth = 0
        self._kind = type(module).__name__
        self._hooks = [] if module is None else [c.register_forward_pre_hook(self) for c in module.children()]

    def __call__(self, child: nn.Module, _: Any) -> None:
        if self.depth or not self._hooks or not torch.is_grad_enabled():
            return
        if not torch.is_autocast_enabled(_device_type(child)):
            self.remove()
            warnings.warn(
                f"the {type(child).__name__} of a prepared {self._kind} is called from outside of its forward: it "
                "computes in fp32, not under autocast. Call the prepared model, or write "
                "`with accelerator.autocast():` around the call.",
                stacklevel=2,
            )

    def remove(self) -> None:
        """Watch no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def __reduce__(self) -> tuple[type[_Watch], tuple[()]]:
        return _Watch, ()


def _device_type(module: nn.Module) -> str:
    return next((p.device.type for p in module.parameters()), "cpu")
