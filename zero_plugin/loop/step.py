"""`step`: complete the gradients of a window, and apply or drop them.

`AcceleratedOptimizer.step()` calls `apply` at the end of a window, and `AcceleratedOptimizer.zero_grad()` calls
`drop_if_meant`.
"""

from __future__ import annotations

from zero_plugin.loop import window_errors
from zero_plugin.loop.together import settle_correction
from zero_plugin.loop.window import Phase, Window
from zero_plugin.strategies.base import Session, release_failed_backward
from zero_plugin.strategies.optimizer_only import UnpreparedOptimizer
from zero_plugin.strategies.precision import FoundInf

_ADDED = (Phase.EMPTY, Phase.ACCUMULATED)  # phases in which gradients are not complete yet


def apply(window: Window, session: Session | UnpreparedOptimizer) -> bool | FoundInf:
    """Apply the gradients of a window that has ended. Collective.

    Returns:
        Whether the step was applied; see `Session.step`.

    Raises:
        LoopError: the gradients must not be applied; see `Session.step`.
    """
    applied: bool | FoundInf = True
    if window.phase in (Phase.EMPTY, Phase.APPLIED):
        is_again = window.phase is Phase.APPLIED and window.keeps_gradients is not False
        session.step_without_backward(is_again=is_again)
    else:
        complete(window, session)
        try:
            applied = session.step(window.measured, max_norm=window.step_norm)
        except BaseException as error:
            window.enter(Phase.FAILED)
            session.raise_clearer(error)
            raise
        window.keeps_gradients = None
    window.finish()
    return applied


def complete(window: Window, session: Session | UnpreparedOptimizer) -> None:
    """Turn the accumulated gradients into the step's: averaged, and without a loss scale. Collective.

    Raises:
        LoopError: a backward has failed; or see `Session.complete_gradients`.
    """
    if window.phase is Phase.FAILED:
        raise window_errors.failed_gradients()
    if window.phase not in _ADDED:
        return
    try:
        if window.phase is Phase.ACCUMULATED:
            own = window.own
            if window.others or own.expected is not None:
                correction = settle_correction(window)
            else:
                correction = own.divisor / own.count if own.count else 1.0
            if correction != 1.0:  # the window was shorter than its divisor
                session.scale_gradients(correction)
        window.measured = session.complete_gradients()
    except BaseException as error:
        window.enter(Phase.FAILED)
        session.raise_clearer(error)
        raise
    window.enter(Phase.COMPLETE)


def first_nonfinite(window: Window, session: Session | UnpreparedOptimizer) -> str | None:
    """Return the name of the first parameter with a non-finite gradient; None if all are finite. Collective."""
    if window.phase in (Phase.EMPTY, Phase.APPLIED):
        return None
    complete(window, session)
    return session.first_nonfinite()


def drop_if_meant(window: Window, session: Session | UnpreparedOptimizer) -> None:
    """Drop the gradients if `zero_grad()` is called between a backward and its step, or after a failed backward.

    At other times nothing is dropped: `apply` clears the gradients, and inside a window they accumulate.

    Raises:
        LoopError: see `Session.agree_to_drop`.
    """
    window.keeps_gradients = False
    if window.phase is Phase.FAILED or window.dropping_is_meant:
        if window.phase is Phase.ACCUMULATED and window.ends_here and isinstance(session, Session):
            try:
                session.agree_to_drop()
            except BaseException:
                window.enter(Phase.FAILED)
                raise
        drop(window, session)
        window.restart()
    elif window.phase in (Phase.EMPTY, Phase.APPLIED) and session.unpartitioned_gradients:
        in_window = not window.ends_here and window.phase is not Phase.APPLIED
        session.drop_foreign_gradients(in_window=in_window)
        if isinstance(session, UnpreparedOptimizer):
            window.enter(Phase.EMPTY)  # the script may have computed gradients itself, which the window did not count


def drop(window: Window, session: Session | UnpreparedOptimizer) -> None:
    """Drop the gradients of the window, in every phase."""
    if window.phase is Phase.FAILED:
        release_failed_backward()  # it may be a backward that the script ran itself
    session.drop_gradients(failed=window.phase is Phase.FAILED)
    window.enter(Phase.EMPTY)


def describe_kept_gradients(window: Window) -> str:
    """Describe what plain torch would do with the last step's gradients, because the script did not drop them.

    Must be called before `Window.count_step`, which resets `since_step`.
    """
    if window.since_step == 0:
        return (
            "optimizer.step() was called twice without a backward() between them: the second call does nothing. "
            "Plain PyTorch applies the same gradients again"
        )
    unsure = ", unless the script sets each p.grad = None, which cannot be detected under ZeRO"
    return (
        "zero_grad() was not called since the last applied step: its gradients were cleared nevertheless. Plain "
        f"PyTorch adds the next gradients to them{unsure if window.keeps_gradients is None else ''}"
    )
