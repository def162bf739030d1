"""Puts something around a module's forward, as if it had been written there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

__all__ = ["wrap_forward"]

Forward = Callable[..., Any]


def wrap_forward(module: nn.Module, around: Callable[..., Any]) -> Callable[[], None]:
    """From now on `module.forward(…)` is `around(forward, …)`.

    Its signature stays, which transformers reads, and a copy of the module computes with the copy's weights.

    Returns:
        What takes it back.
    """
    own = module.__dict__.get("forward")  # one that the script, or a library, has set on this object

    def wrapped(forward: Forward) -> Forward:
        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            return around(forward, *args, **kwargs)

        return call

    placed: Forward
    if own is None:
        placed = MethodType(wrapped(type(module).forward), module)  # copying a module binds its methods anew
    elif isinstance(own, MethodType) and own.__self__ is module:
        placed = MethodType(wrapped(own.__func__), module)
    else:
        placed = wrapped(own)
    module.forward = placed

    def undo() -> None:
        if module.__dict__.get("forward") is not placed:
            return  # what was put around it since then
        if own is None:
            del module.forward
        else:
            module.forward = own

    return undo
