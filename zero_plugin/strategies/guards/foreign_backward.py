"""Refuses a backward that the session does not run."""

from __future__ import annotations

from zero_plugin.errors import LoopError
from zero_plugin.strategies.base import DIRECT_BACKWARD
from zero_plugin.strategies.events import Guard


class ForeignBackward(Guard):
    """Raises in a backward that is not of the session, at the first parameter that it reaches.

    Mistake: `loss.backward()` instead of `accelerator.backward(loss)`: the loss is not divided by the micro-batches,
    has no loss scale, and stage 1 would not reduce.
    Cost: a hook for each parameter and backward.
    """

    def gradient_outside(self) -> None:
        """Refuse the gradient; some of the others are already accumulated, so that none may be applied."""
        if self.session.on_failure is not None:
            self.session.on_failure()
        raise LoopError(DIRECT_BACKWARD)
