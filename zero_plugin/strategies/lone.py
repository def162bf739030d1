"""An optimizer by itself: its model is not prepared, or not yet."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_plugin.accumulation import AccumulationWindow
from zero_plugin.errors import LoopError

__all__ = ["LoneOptimizer"]


class LoneOptimizer:
    """Stands for the session until there is a model to make one with; the calls are those of `Session`.

    Args:
        optimizer: the torch optimizer.
        window: in which it steps.
        steps: whether it may step: then it does what torch does. Not where gradients would stay with this process,
            or the model is to be partitioned.
    """

    whole_gradients: Final = True
    whole_states: Final = True
    states_are: Final = ""
    failed: Final = False
    most_skips: Final = 0
    loss_scale: Final = 1.0
    before_change: Final = None

    def __init__(self, optimizer: Optimizer, window: AccumulationWindow, *, steps: bool) -> None:
        self.optimizer: Optimizer | None = optimizer
        self._window = window
        self._steps = steps

    def step(self) -> bool:
        """Step, as torch does, and drop the gradients.

        Raises:
            LoopError: it may not.
        """
        assert self.optimizer is not None
        if not self._steps:
            raise LoopError(
                f"optimizer.step(): the model of this {type(self.optimizer).__name__} was not prepared, so that its "
                "gradients are those of this process alone.\nPass the model to prepare(), best in one call with its "
                "optimizer."
            )
        self.optimizer.step()
        self.drop_gradients()
        return True

    def clip(self, max_norm: float, *, norm_type: float, only: list[Tensor] | None) -> Tensor:
        """See `Session.clip`."""
        return torch.nn.utils.clip_grad_norm_(only or self._parameters(), max_norm, norm_type)

    def scale_gradients(self, factor: float) -> None:
        """See `Session.scale_gradients`."""
        for p in self._parameters():
            if p.grad is not None:
                p.grad.mul_(factor)

    def first_nonfinite(self) -> str | None:
        """See `Session.first_nonfinite`; torch does not look."""
        return None

    def drop_gradients(self) -> None:
        """See `Session.drop_gradients`."""
        assert self.optimizer is not None
        self.optimizer.zero_grad(set_to_none=True)

    def drop_strays(self) -> None:
        """See `Session.drop_strays`; nobody knows here whose gradients they are, but within a window they add up."""
        if self._window.ends_here:
            self.drop_gradients()

    def close(self) -> None:
        """It steps no more."""
        self.optimizer = None

    def _parameters(self) -> list[Tensor]:
        assert self.optimizer is not None
        return [p for group in self.optimizer.param_groups for p in group["params"]]
