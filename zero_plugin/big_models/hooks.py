"""Hooks run code before and after a module's forward, with its arguments and its output.

One of them keeps the weights of layers in a small dtype, and computes in a larger one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, Final, ParamSpec, TypeVar, cast

import torch
from torch import nn

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Layers that do nothing but compute with their own weights.
_LAYERS: Final = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    nn.Linear,
)


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


class LayerwiseCastingHook(ModelHook):
    """The module's weights have one type in its forward and another between forwards.

    Args:
        storage_dtype: between forwards.
        compute_dtype: in the forward.
        non_blocking: do not wait for copies.
    """

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool = False) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        """To the type of storage."""
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """To the type of the forward."""
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Back to the type of storage."""
        self.interrupted(module)
        return output

    def interrupted(self, module: nn.Module) -> None:
        """Back to the type of storage."""
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | Iterable[str] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Put a `LayerwiseCastingHook` on every linear and convolution layer.

    Values lose what the storage type cannot hold; a loss is seen at once, and does not grow.

    Args:
        module: changed in place.
        storage_dtype: for example `torch.float8_e4m3fn`.
        compute_dtype: for example `torch.bfloat16`.
        skip_modules_pattern: regular expressions; modules where one is found in the name stay as they are, with all
            inside.
        skip_modules_classes: classes of modules that stay as they are, with all inside.
        non_blocking: do not wait for copies.
    """
    patterns = [skip_modules_pattern] if isinstance(skip_modules_pattern, str) else list(skip_modules_pattern or ())
    remaining = [("", module)]
    while remaining:
        name, part = remaining.pop()
        if isinstance(part, skip_modules_classes or ()) or any(re.search(pattern, name) for pattern in patterns):
            continue
        if isinstance(part, _LAYERS):
            add_hook_to_module(part, LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking), append=True)
        else:
            remaining.extend((f"{name}.{key}".lstrip("."), child) for key, child in part.named_children())
