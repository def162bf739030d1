"""Refuse a step with parameters that were frozen after `prepare` and got no gradient."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zero_plugin.errors import LoopError
from zero_plugin.strategies.events import Guard, Sampling
from zero_plugin.strategies.precision import FoundInf


class FrozenLater(Guard):
    """A guard that refuses a step with parameters that were frozen after `prepare` and got no gradient since.

    Mistake: a script freezes a layer after some epochs. ZeRO partitions the optimizer once, so momentum and weight
    decay would still change the layer.
    Cost: one read of `requires_grad` of each parameter for each step; at stages 2 and 3 a set of ids.
    """

    def __init__(self, session: Any, sampling: Sampling) -> None:
        super().__init__(session, sampling)
        numbers = session.gradients.numbered_parameters()
        self._numbers = {id(p): number for number, p in numbers.items()}
        self._reduced: set[int] = set()  # numbers of the parameters whose gradients this window has reduced
        self._reduces_in_backward = session.gradients.agreement is not None

    def before_reduce(self, ids: Iterable[int]) -> None:
        """Note the parameters whose gradients are reduced."""
        self._reduced.update(ids)

    def before_complete(self) -> None:
        """Check the frozen parameters.

        Raises:
            LoopError: a frozen parameter got no gradient in this window.
        """
        frozen = []
        for p in self.session.trained:
            if not p.requires_grad:
                frozen.append(p)  # noqa: PERF401 - a comprehension would be a further call in each step
        if frozen:
            self._refuse(frozen)

    def stepped(self, applied: bool | FoundInf = False) -> None:  # noqa: ARG002
        """Begin a window."""
        self._reduced.clear()

    dropped = stepped

    def _refuse(self, frozen: Iterable[Any]) -> None:
        session = self.session
        left_out = {id(p) for p in session.left_out}
        ids = {id(p) for p in frozen if p.numel() and id(p) not in left_out and not self._has_reached(p)}
        still = [name for name, p in session.module.named_parameters() if id(p) in ids]
        if still:
            shown = ", ".join(still[:4]) + (f" and {len(still) - 4} more" if len(still) > 4 else "")
            raise LoopError(
                f"{shown} of the {type(session.module).__name__} were frozen after prepare() and got no gradient: "
                "under ZeRO the optimizer's momentum and weight decay would still change them.\n"
                "Freeze parameters before prepare(). To freeze them later: accelerator.free_memory(), then prepare() "
                "the model again with a new optimizer. If a model is frozen for another model's loss, do not call its "
                "optimizer's step() then."
            )

    def _has_reached(self, parameter: Any) -> bool:
        if self._reduces_in_backward:
            return self._numbers[id(parameter)] in self._reduced
        return bool(self.session.gradients.has_reached(parameter))
