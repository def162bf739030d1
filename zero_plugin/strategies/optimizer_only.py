"""Optimizers without a prepared model, and steps that are taken in parts."""

from __future__ import annotations

import functools
import math
import types
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)

from zero_plugin.errors import LoopError
from zero_plugin.strategies.precision import Measured


class UnpreparedOptimizer:
    """A replacement for the session of an optimizer without a prepared model; it has the same methods.

    Args:
        optimizer: the torch optimizer.
        steps: whether the optimizer may step, as in plain torch. False if gradients would not be averaged over the
            the model will be partitioned.
    """

    unpartitioned_gradients: Final = True
    unpartitioned_states: Final = True
    states_are: Final = ""
    most_skips: Final = 0
    loss_scale: Final = 1.0
    before_change: Final = None

    def __init__(self, optimizer: Optimizer, *, steps: bool) -> None:
        self.optimizer: Optimizer | None = optimizer
        self._steps = steps

    def step(self, measured: Measured, *, max_norm: float) -> bool:  # noqa: ARG002
        """Step as plain torch does; keep the gradients until `zero_grad`.

        Raises:
            LoopError: the optimizer may not step.
        """
        assert self.optimizer is not None
        if not self._steps:
            raise LoopError(
                f"optimizer.step(): the model of this {type(self.optimizer).__name__} was not prepared, so its "
                "gradients were not averaged over the processes.\nPass the model to prepare(), best in one call with "
                "its optimizer."
            )
        self.optimizer.step()
        return True

    def step_without_backward(self, *, is_again: bool) -> None:  # noqa: ARG002
        """Step: the script may have called `loss.backward()` itself."""
        self.step(Measured(), max_norm=math.inf)

    def raise_clearer(self, error: BaseException) -> None:
        """Return: plain torch's own errors are clear."""

    def complete_gradients(self) -> Measured:
        return Measured()

    def clip(self, max_norm: float, *, norm_type: float, only: list[Tensor] | None, measured: Measured) -> Measured:
        norm = torch.nn.utils.clip_grad_norm_(only or self._parameters(), max_norm, norm_type)
        return measured._replace(norm=norm)

    def scale_gradients(self, factor: float) -> None:
        for p in self._parameters():
            if p.grad is not None:
                p.grad.mul_(factor)

    def first_nonfinite(self) -> str | None:
        """Return None: plain torch does not check gradients."""
        return None

    def drop_gradients(self, *, failed: bool) -> None:  # noqa: ARG002
        assert self.optimizer is not None
        self.optimizer.zero_grad(set_to_none=True)

    def drop_foreign_gradients(self, *, in_window: bool) -> None:
        """Drop the gradients if no window is open; inside a window they accumulate."""
        if not in_window:
            self.drop_gradients(failed=False)

    def close(self) -> None:
        """Release the optimizer."""
        self.optimizer = None

    def _parameters(self) -> list[Tensor]:
        assert self.optimizer is not None
        return [p for group in self.optimizer.param_groups for p in group["params"]]


def has_step_hooks(optimizer: Any) -> bool:
    """Return whether torch's step hooks work: not for a wrapper that does not call `Optimizer.__init__`."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")  # torch has no public way to ask


def take_step_hooks(optimizer: Any) -> tuple[dict[int, Any], dict[int, Any]]:
    """Remove and return the script's hooks before and after `step`."""
    if not has_step_hooks(optimizer):
        return {}, {}
    taken = []
    for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
        taken.append(dict(hooks))
        hooks.clear()
    return taken[0], taken[1]


def skips_by_found_inf(optimizer: Optimizer, own_hooks: int) -> bool:
    """Return whether `step` does nothing at all if torch's attribute `found_inf` of the optimizer is 1.

    torch's fused optimizers do that. For other classes, or with the script's hooks, `step` may do more than that. A
    fused SGD whose first step is skipped would use uninitialized memory as momentum.

    Args:
        optimizer: the torch optimizer.
        own_hooks: the number of the optimizer's step hooks that guards have registered.
    """
    if type(optimizer) not in (Adagrad, Adam, AdamW, SGD):
        return False
    hooks = (optimizer._optimizer_step_post_hooks, _global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    return (
        all(group["fused"] for group in optimizer.param_groups)
        and not any(hooks)
        and len(optimizer._optimizer_step_pre_hooks) == own_hooks
        and vars(optimizer).keys().isdisjoint(("step", "found_inf"))
        and all(
            p.grad is None or optimizer.state.get(p, {}).get("momentum_buffer") is not None
            for group in optimizer.param_groups
            if group.get("momentum")
            for p in group["params"]
        )
    )


def weakly(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that calls a function or method while that function exists elsewhere.

    Use it for hooks that torch keeps in a global registry or in C++, where Python's GC cannot see them, and for hooks
    that are copied with a module.
    """
    is_method = isinstance(call, types.MethodType)
    reference: weakref.ref[Any] = weakref.WeakMethod(call) if is_method else weakref.ref(call)

    def hook(*args: Any) -> Any:
        held = reference()
        return None if held is None else held(*args)

    return hook


class StepInParts:
    """A patch of an optimizer's `step`, so a step that DeepSpeed takes in parts counts as one step.

    DeepSpeed steps the parameter groups (at stage 3 the sub-groups) one after another, with a call of `step` for each.
    Counters in the optimizer's groups, in its attributes or under a name in `state` would advance with each call. Here
    every part begins with the counters from the beginning of the step, and sees only the groups with parameters.

    Args:
        optimizer: the torch optimizer. `remove` restores its `step`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._replaced = optimizer.__dict__.get("step")  # set if a scheduler or the script has replaced it
        self._begun: dict[Any, dict[Any, Any]] | None = None
        step = optimizer.step

        @functools.wraps(step)  # copies the mark by which torch's schedulers recognize their patch
        def part(own: Optimizer, *args: Any, **kwargs: Any) -> Any:
            groups = own.param_groups
            own.param_groups = [group for group in groups if group["params"]]
            self._rewind()
            try:
                return step(*args, **kwargs)
            finally:
                own.param_groups = groups

        optimizer.step = types.MethodType(part, optimizer)  # type: ignore[method-assign]

    def begin(self) -> None:
        """Begin a step: all following parts belong to it."""
        self._begun = {place: _numbers_in(mapping) for place, mapping in self._places().items()}

    def remove(self) -> None:
        """Restore the optimizer's own `step`."""
        del self._optimizer.__dict__["step"]
        if self._replaced is not None:
            self._optimizer.__dict__["step"] = self._replaced

    def _places(self) -> dict[Any, MutableMapping[Any, Any]]:
        optimizer = self._optimizer
        groups = {id(group): group for group in optimizer.param_groups}
        return {"attributes": optimizer.__dict__, "state": optimizer.state, **groups}

    def _rewind(self) -> None:
        if self._begun is None:
            return
        for place, mapping in self._places().items():
            begun = self._begun.get(place, {})
            for name, value in _numbers_in(mapping).items():
                if name not in begun:
                    del mapping[name]
                elif isinstance(value, Tensor) and isinstance(begun[name], Tensor):
                    mapping[name].copy_(begun[name])
                else:
                    mapping[name] = begun[name]


def _numbers_in(mapping: MutableMapping[Any, Any]) -> dict[Any, Any]:
    """Copy the entries that are single values and have a name. States of parameters have tensors as keys."""
    return {
        name: value.detach().clone() if isinstance(value, Tensor) else value
        for name, value in mapping.items()
        if not isinstance(name, Tensor) and name != "params"
        if isinstance(value, bool | int | float | str | tuple | None)
        or (isinstance(value, Tensor) and value.numel() == 1)
    }
