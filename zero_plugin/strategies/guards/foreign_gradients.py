"""Refuse gradients in `p.grad` that no backward of the session has computed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zero_plugin.errors import LoopError
from zero_plugin.strategies.base import FOREIGN_GRADIENTS
from zero_plugin.strategies.events import Guard, Sampling


class ForeignGradients(Guard):
    """A guard that refuses foreign gradients, which the session would apply.

    Mistake: `loss.backward()` before `prepare`, or with another model; a `p.grad` that the script sets before the
    backward. They would be added to the gradients of the step, without the loss scale and the average.
    Cost: one read of `p.grad` of each parameter for each window and step.
    """

    def __init__(self, session: Any, sampling: Sampling) -> None:
        super().__init__(session, sampling)
        # Frozen parameters cannot have hooks on their gradients.
        groups = session.optimizer.param_groups
        self._frozen = [p for group in groups for p in group["params"] if not p.requires_grad]

    def before_backward(self, loss: Tensor, *, is_first: bool) -> None:  # noqa: ARG002
        """Check the parameters before the first backward of a window."""
        if is_first:
            self._refuse_any()

    def before_step(self) -> None:
        """Check the frozen parameters, which no backward reaches."""
        for p in self._frozen:
            if p.grad is not None:
                raise LoopError(FOREIGN_GRADIENTS)

    def nothing_to_step(self, *, is_again: bool) -> None:
        """Check all parameters, unless the gradients of the last step may still exist."""
        self.before_step()
        if not is_again:
            self._refuse_any()

    def _refuse_any(self) -> None:
        for group in self.session.optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    raise LoopError(FOREIGN_GRADIENTS)
