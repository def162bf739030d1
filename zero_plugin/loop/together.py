"""Windows of several trained models: one micro-batch may compute gradients in more than one model.

A model's accumulated gradients may then have parts from other models' windows (`Window.others`). Each part was divided
by the planned size of its own window, and must be corrected if that window is shorter in the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from zero_plugin.loop import window_errors
from zero_plugin.loop.window import Phase, Window
from zero_plugin.strategies.base import Session
from zero_plugin.strategies.optimizer_only import UnpreparedOptimizer

WindowOf = tuple[Window, Session | UnpreparedOptimizer | None]
"""A window, and the holder of its gradients; None if the window only counts."""


class TogetherWindows:
    """The context manager of `accumulate()` for one micro-batch of several models."""

    def __init__(self, windows: Sequence[Window]) -> None:
        self._windows = windows

    def __enter__(self) -> None:
        for window in self._windows:
            window.enter_batch()

    def __exit__(self, *_: object) -> None:
        for window in self._windows:
            window.leave_batch()


def share_divisor(windows: Sequence[WindowOf]) -> int:
    """Return the common divisor of a loss for all these windows, before the micro-batch is counted.

    If the windows have different divisors, all switch to their `steps`, and correct this at their ends.
    """
    if len({window.next_divisor for window, _ in windows}) > 1:
        for window, session in windows:
            if window.next_divisor != window.steps:  # its epoch ends within the window
                _divide_by(window.steps, window, session)
    return windows[0][0].next_divisor


def share_loss_scale(windows: Sequence[tuple[Window, Session]]) -> None:
    """Set the loss scale of all models to the smallest one: a loss is multiplied by one scale only."""
    smallest = min(session.loss_scale for _, session in windows)
    for window, session in windows:
        if session.loss_scale != smallest:
            set_loss_scale(smallest, window, session)


def set_loss_scale(scale: float, window: Window, session: Session) -> None:
    """Change the loss scale of a model, and rescale its scaled gradients."""
    are_complete = window.phase in (Phase.COMPLETE, Phase.CLIPPED)
    session.set_loss_scale(scale, accumulated=window.phase is Phase.ACCUMULATED, complete=are_complete)


def count_foreign_backward(window: Window, *, ends: bool, windows: Iterable[Window] = ()) -> None:
    """Count a backward that computed gradients of a model in a micro-batch of other models.

    Args:
        window: the window of the model.
        ends: whether the other windows end there. If this model has only gradients of foreign backwards, its step
            applies them where the other models' steps act.
        windows: the windows of the other models.

    Raises:
        LoopError: the gradients need a correction, but were added to complete gradients, which are already corrected.
    """
    window.since_step += 1
    for other in windows:
        if other.own.correction not in (None, 1.0) and window.phase in (Phase.COMPLETE, Phase.CLIPPED):
            window.enter(Phase.FAILED)
            raise window_errors.late_backward(window.completed_by)
        window.others.setdefault(other.own, 1.0)
    if not (window.in_context or window.backwards or window.is_decided):
        window.ends_here = ends


def correction(window: Window) -> float:
    """Return the factor that corrects the accumulated gradients from their divisors to the micro-batch counts.

    Raises:
        LoopError: the gradients come from windows that need different factors.
    """
    known = [(of.correction, multiplied) for of, multiplied in window.others.items()]
    factors = [factor / multiplied for factor, multiplied in known if factor is not None]
    if window.own.count:
        factors.append(window.own.divisor / window.own.count)
    if not all(math.isclose(factor, factors[0]) for factor in factors):
        sizes = [("its own", window.own)] if window.own.count else []
        sizes += [("another model's", of) for of in window.others]
        raise window_errors.different_sizes(
            [f"{whose} has {of.count if of.are_all else of.divisor} micro-batches" for whose, of in sizes]
        )
    return factors[-1] if factors else 1.0


def settle_correction(window: Window) -> float:
    """Return the correction of a step, and record it in open windows of other models.

    An open window must reach the recorded correction when it ends, because this step has used its gradients.

    Raises:
        LoopError: a step of another model has used these gradients with another correction; or see `correction`.
    """
    own, factor = window.own, correction(window)
    if own.count and own.expected is not None and not math.isclose(own.expected, own.divisor / own.count):
        raise window_errors.used_gradients(own.count, round(own.divisor / own.expected))
    for micro_batches, multiplied in window.others.items():
        if micro_batches.correction is None:
            micro_batches.expected = factor * multiplied
    return factor


def _divide_by(divisor: int, window: Window, session: Session | UnpreparedOptimizer | None) -> None:
    """Change the divisor of the window's losses, and rescale gradients that are already accumulated."""
    if divisor == window.own.divisor:
        return
    factor = window.own.divisor / divisor
    window.own.divisor = divisor
    if window.phase is Phase.ACCUMULATED and session is not None:
        session.scale_gradients(factor)
        window.others = {of: multiplied * factor for of, multiplied in window.others.items()}
