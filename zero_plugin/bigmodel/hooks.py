"""Run code before and after a module's forward, with its arguments and its output."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import nn

__all__ = [
    "ModelHook",
    "SequentialHook",
    "add_hook_to_module",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
    "untraced",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")


class ModelHook:
    """What runs around a module's forward; override what is needed.

    Attributes:
        no_grad: the forward runs under `torch.no_grad()`.
    """

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """When the hook comes to the module, which is returned."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:  # noqa: ARG002
        """Before the forward; returns the arguments that it gets."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:  # noqa: ARG002
        """After the forward; returns what the caller gets."""
        return output

    def interrupted(self, module: nn.Module) -> None:
        """Instead of `post_forward` when `pre_forward` or the forward raised."""

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """When the hook leaves the module, which is returned."""
        return module


class SequentialHook(ModelHook):
    """Several hooks, one after another."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks
        self.no_grad = any(hook.no_grad for hook in hooks)

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Each hook's."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Each hook gets the arguments of the one before."""
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Each hook gets the output of the one before."""
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def interrupted(self, module: nn.Module) -> None:
        """Each hook's."""
        for hook in self.hooks:
            hook.interrupted(module)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Each hook's."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Let a hook run around the module's `forward`, also where that is called by name.

    Args:
        module: changed in place.
        hook: takes the place of the one that is there.
        append: run it after the one that is there instead.

    Returns:
        The module.
    """
    held: Any = module
    present: ModelHook | None = getattr(module, "_hf_hook", None)
    if present is not None:
        remove_hook_from_module(module)
    chained = SequentialHook(present, hook) if append and present is not None else hook
    forward = held.forward
    chained.init_hook(module)
    held._old_forward = forward
    held._hf_hook = chained
    # A partial of a function of this module: a copied or pickled model takes it along, bound to the copy.
    held.forward = functools.update_wrapper(functools.partial(_forward, module), forward)
    return module


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Take the hook off, if there is one, and give the module its own `forward` back.

    Args:
        module: changed in place.
        recurse: off all modules inside too.

    Returns:
        The module.
    """
    held: Any = module
    if hasattr(module, "_hf_hook"):
        held._hf_hook.detach_hook(module)
        del held._hf_hook
    if hasattr(module, "_old_forward"):
        del held.forward
        if getattr(module.forward, "__func__", None) is not getattr(held._old_forward, "__func__", held._old_forward):
            held.forward = held._old_forward  # it was the module's alone, not its class's
        del held._old_forward
    for guarded in ("to", "cuda"):  # by `dispatch_model`
        held.__dict__.pop(guarded, None)
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse=True)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Take the hooks off a module and all modules inside."""
    remove_hook_from_module(module, recurse=True)


def untraced(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """The method, run as it is where `torch.compile` traces what calls it."""
    kept: list[Callable[_P, _R]] = []  # made when it is needed, because it takes seconds to import torch's compiler

    @functools.wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch.compiler.is_compiling():
            return method(*args, **kwargs)
        if not kept:
            kept.append(torch.compiler.disable(method))  # type: ignore[no-untyped-call]
        return kept[0](*args, **kwargs)

    return call


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    held: Any = module
    hook = cast(ModelHook, held._hf_hook)
    try:
        args, kwargs = hook.pre_forward(module, *args, **kwargs)
        with torch.no_grad() if hook.no_grad else nullcontext():
            output = held._old_forward(*args, **kwargs)
    except BaseException:
        hook.interrupted(module)
        raise
    return hook.post_forward(module, output)
