"""Refuse a backward that the session does not run."""

from __future__ import annotations

from zero_plugin.errors import LoopError
from zero_plugin.strategies.base import DIRECT_BACKWARD
from zero_plugin.strategies.events import Guard


class ForeignBackward(Guard):
    """A guard that raises in a foreign backward, at the first parameter that the backward reaches.

    Mistake: `loss.backward()` instead of `accelerator.backward(loss)`: the loss is not divided by the micro-batches,
    has no loss scale, and stage 1 would not reduce.
    Cost: a hook for each parameter and backward.
    """

    def gradient_outside(self) -> None:
        """Refuse the gradient. No gradient may be applied: this backward has already changed some others."""
        if self.session.on_failure is not None:
            self.session.on_failure()
        raise LoopError(DIRECT_BACKWARD)
