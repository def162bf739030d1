"""Refuses steps of an optimizer that nobody corrected, unscaled or clipped: those that are not its session's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from zero_plugin.errors import LoopError

__all__ = ["StepGuard"]


class StepGuard:
    """Lets optimizers step while `is_open` only.

    Args:
        optimizers: the one that runs, and the one that the script gave where it is another.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self.is_open = False
        self._hooks = [optimizer.register_step_pre_hook(self._refuse) for optimizer in optimizers]

    def remove(self) -> None:
        """Let them step."""
        for hook in self._hooks:
            hook.remove()

    def _refuse(self, optimizer: Optimizer, *_: Any) -> None:
        if not self.is_open:
            raise LoopError(
                f"step() of the {type(optimizer).__name__} that was given to prepare(): its gradients may be scaled, "
                "incomplete or partitioned.\nCall step() of the optimizer that prepare() returned."
            )
