"""`Window`: one accumulation window of a model, from the first backward to the optimizer step that applies it."""

from __future__ import annotations

import enum
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from zero_plugin.data.active import LoaderProgress
from zero_plugin.errors import LoopError
from zero_plugin.strategies.base import LOSS_OF_OTHERS, Session, release_failed_backward
from zero_plugin.strategies.optimizer_only import UnpreparedOptimizer
from zero_plugin.strategies.precision import FoundInf, Measured

FAILED_BACKWARD = (
    "a backward or a step of this model has failed, and the gradients that it left must not be applied.\n"
    "Call optimizer.zero_grad() before you continue: it drops the gradients and starts a new accumulation window."
)
_ONLY_TRAINED: Final = "only models that are prepared are trained by their windows"
CLIP_NORM: Final = "clip_grad_norm_()"
CLIP_VALUE: Final = "clip_grad_value_()"
# Why no backward may follow one of the script's calls that complete the gradients of a step, before that step.
_TOO_LATE: Final = {
    CLIP_NORM: "the clipped norm would not be the step's",
    CLIP_VALUE: "the gradients that it adds would not be clamped",
}
_APART: Final = (
    "A stream, whose length is unknown, ends so. Use a map-style dataset, or leave the last batches of a stream out; "
    "accumulate the models together (`with accelerator.accumulate(one, other):`); or freeze a model for the losses of "
    "the other one (model.requires_grad_(False) before the forward)."
)
_SCALED: Final = "the gradients that it adds would have the loss scale, which was divided out of the others"


class Phase(enum.Enum):
    """What the gradients of a window are.

    `NEXT_PHASES` has the legal transitions. Everything else raises `LoopError`, or does nothing where the docstring of
    the method says so.
    """

    EMPTY = enum.auto()
    """No backward has reached the model since the gradients were dropped."""

    ACCUMULATED = enum.auto()
    """Backwards have reached it; the gradients are divided by `Window.divisor`, and may have a loss scale."""

    COMPLETE = enum.auto()
    """The gradients are the step's: averaged over processes and micro-batches, and without a loss scale."""

    CLIPPED = enum.auto()
    """The same, and the script has clipped them."""

    APPLIED = enum.auto()
    """The step was taken, or skipped. Scripts may read the gradients until the next backward."""

    FAILED = enum.auto()
    """A backward or a step raised, and has left gradients that must not be applied."""


NEXT_PHASES: Final[Mapping[Phase, frozenset[Phase]]] = {
    Phase.EMPTY: frozenset({Phase.EMPTY, Phase.ACCUMULATED, Phase.COMPLETE, Phase.APPLIED, Phase.FAILED}),
    Phase.ACCUMULATED: frozenset({Phase.EMPTY, Phase.ACCUMULATED, Phase.COMPLETE, Phase.FAILED}),
    Phase.COMPLETE: frozenset({Phase.EMPTY, Phase.COMPLETE, Phase.CLIPPED, Phase.APPLIED, Phase.FAILED}),
    Phase.CLIPPED: frozenset({Phase.EMPTY, Phase.CLIPPED, Phase.APPLIED, Phase.FAILED}),
    Phase.APPLIED: frozenset({Phase.EMPTY, Phase.ACCUMULATED, Phase.APPLIED, Phase.FAILED}),
    Phase.FAILED: frozenset({Phase.EMPTY, Phase.FAILED}),
}


@dataclass(eq=False)
class MicroBatches:
    """The micro-batches of one accumulation window.

    Attributes:
        divisor: the number that their losses are divided by: their number by `len(loader)` when the window opened.
        most: how many there are if the epoch turns out longer than `len(loader)`.
        count: how many there are so far.
        are_all: whether the window ended with the last one.
        expected: the correction with which a step of another model has used gradients of theirs before that.
    """

    divisor: int
    most: int
    count: int = 0
    are_all: bool = False
    expected: float | None = None

    @property
    def correction(self) -> float | None:
        """The factor that corrects the divisor to their number; None as long as nothing depends on it."""
        return self.divisor / self.count if self.are_all else self.expected


class Window:
    """Counts a model's micro-batches, and tells its session when to reduce, rescale, clip, step and drop gradients.

    A window has `steps` micro-batches; the last one of an epoch may have fewer. Micro-batches are counted in one of
    three ways. With `accumulate()`, which returns the window as a context manager, each entry is one (`enter_batch`).
    Without it, each `backward` is one. Or the script sets whether the window ends (`decide`), and no micro-batch is
    counted until the next `accumulate()`.

    The loss of each micro-batch is divided by the actual size of the window, if the loader knows its length when the
    window opens. Otherwise it is divided by `steps`, and if the window was shorter, the accumulated gradients are
    multiplied by `correction`. That includes gradients from micro-batches of other models' windows.

    Args:
        steps: micro-batches per optimizer step, at least 1.
        session: what computes and applies the gradients. None only counts: the script does the rest.
        progress: where the loop is in the epochs of the prepared loaders.

    Attributes:
        session: the given session; there is none if the window only counts.
        steps: micro-batches per optimizer step, from the next window on.
        plans_ahead: whether losses are divided by the actual size, if it is known, outside `accumulate()` too. False
            with several models: there it is known only after the backward whose micro-batch it was.
        in_context: whether the loop is inside `accumulate()`.
        ends_here: whether the current micro-batch is the window's last, so that `step()` applies the gradients.
        is_decided: whether the script has set `ends_here`.
        phase: what the gradients are.
        backwards: backwards of the window so far, which no step has applied yet.
    """

    def __init__(
        self, steps: int, session: Session | UnpreparedOptimizer | None = None, progress: LoaderProgress | None = None
    ) -> None:
        self.steps = steps
        self.plans_ahead = True
        self._given = session
        if session is not None:
            self.session: Session | UnpreparedOptimizer = session
        self._progress = LoaderProgress() if progress is None else progress
        self.phase = Phase.EMPTY
        self._measured = Measured()  # of the gradients, once they are COMPLETE
        self._completed_by = CLIP_NORM  # the last call of the script that needs them COMPLETE
        # Whether the gradients of the last step are still in p.grad, because the script has not called zero_grad().
        # None: a step was applied, and this is not known before the next backward (under ZeRO, never).
        self._gradients_kept: bool | None = False
        self.in_context = False
        self._by_context = False  # this window's micro-batches are counted by accumulate()
        self.is_decided = False
        self.ends_here = True  # before the first micro-batch, as after a window
        self._own = MicroBatches(steps, steps)  # of this window
        # Micro-batches of other models' windows that have also contributed to the accumulated gradients -> the factor
        # by which these gradients were multiplied since.
        self._other_micro_batches: dict[MicroBatches, float] = {}
        self.backwards = 0
        self._before_batch = 0  # backwards of the window before accumulate() was entered last
        self._since_step = 0  # backwards since the last call of step(), also those of other models' micro-batches
        if isinstance(session, Session):
            session.on_failure = _failing(weakref.ref(self))

    @property
    def steps_an_optimizer(self) -> bool:
        """Whether an optimizer is stepped where the window ends; False where it only counts."""
        return self._given is not None

    # ---- micro-batches -----------------------------------------------------------------------------------------------

    @property
    def divisor(self) -> int:
        """The number that the loss of the current micro-batch is divided by."""
        return self._own.divisor

    @property
    def next_divisor(self) -> int:
        """The number that the loss of the next backward is divided by, before it is counted, beside other models."""
        opens = not self.in_context and (self._by_context or self._own.count == 0 or self.steps == 1)
        return self.steps if opens else self._own.divisor

    @property
    def correction(self) -> float:
        """The factor on the accumulated gradients that corrects their divisors to the actual numbers of micro-batches.

        Raises:
            LoopError: they are of windows that need different factors.
        """
        known = [(of.correction, multiplied) for of, multiplied in self._other_micro_batches.items()]
        factors = [correction / multiplied for correction, multiplied in known if correction is not None]
        if self._own.count:
            factors.append(self._own.divisor / self._own.count)
        if not all(math.isclose(factor, factors[0]) for factor in factors):
            raise LoopError(self._describe_different_sizes())
        return factors[-1] if factors else 1.0

    @property
    def next_backward_ends(self) -> bool:
        """Whether the next backward is the last of the window, before the forward of its micro-batch."""
        if self.in_context and self._own.count == 0 and not self.is_decided:
            return self._is_end(1, is_counted=True)
        if self.in_context or self.is_decided:
            return self.ends_here
        if self._by_context and self.ends_here:
            return self.steps == 1 or self._progress.next_is_last  # of the window after this one
        return self._is_end(self._own.count + 1, is_counted=False)

    @property
    def holds_gradients(self) -> bool:
        """Whether the model has accumulated gradients of this window that no step has applied yet."""
        return self.backwards > 0

    @property
    def is_begun(self) -> bool:
        """Whether micro-batches of this window were counted, and others are to come."""
        return self.holds_gradients or (self._own.count > 0 and not self.ends_here)

    @property
    def dropping_is_meant(self) -> bool:
        """Whether `zero_grad()`, called now, is between a backward and its step, so that it drops gradients.

        Loops also call it at their start, or after each micro-batch, where it must not drop gradients. Inside
        `accumulate()` a script leaves out the step of a window where it calls it after the last micro-batch's backward.
        """
        if self.is_decided and not self.ends_here:
            return False
        if self.in_context and self.ends_here and self.backwards > self._before_batch:
            return self._since_step > 0
        if self.in_context or (self._by_context and not self.ends_here):
            return self._since_step > self.backwards == 0  # only foreign gradients, since the last window's step
        return self._since_step > 0

    def enter_batch(self) -> None:
        """Count a micro-batch when `accumulate()` is entered."""
        if self.in_context:
            raise LoopError("accumulate() is entered inside accumulate(); exit the first one before the next batch.")
        self.is_decided = False
        if self.ends_here:
            self._open()
        self._before_batch = self.backwards
        self.in_context = self._by_context = True
        self._advance()

    def leave_batch(self, *_: object) -> None:
        """Called when `accumulate()` is exited."""
        self.in_context = False

    __enter__, __exit__ = enter_batch, leave_batch

    def count_backward(self) -> None:
        """Count a backward; outside `accumulate()` it is one micro-batch.

        Raises:
            LoopError: outside `accumulate()`, more backwards ran without `step()` than the window has micro-batches, or
                a second one ran in one batch of a prepared loader.
        """
        self._since_step += 1
        if self.in_context:
            self.backwards += 1
            if self._own.count == 0:  # the window was opened again at this micro-batch
                self._advance(is_new=False)
            return
        if self._by_context or self._own.count == 0 or self.steps == 1:
            self._open()
        elif self.ends_here and self._own.count >= self._own.divisor and not self.is_decided:
            raise LoopError(self._describe_missing_step())
        self.backwards += 1
        self._advance()
        if not self._progress.is_own and self.steps > 1 and not self.is_decided:
            raise LoopError(
                "backward() ran twice in one batch of the prepared loader, outside accumulate(), and "
                f"gradient_accumulation_steps is {self.steps}: it is ambiguous whether these are two micro-batches, or "
                "two losses of one.\nWrap each micro-batch in `with accelerator.accumulate(model):`, with one "
                "backward() inside if the loop splits the loader's batches, or with all losses of a batch inside."
            )

    def count_foreign_backward(self, *, ends: bool, windows: Iterable[Window] = ()) -> None:
        """Count a backward that computed gradients of this model in a micro-batch of other models.

        Args:
            ends: whether their windows end there. If this model has gradients of such backwards alone, a step applies
                them where theirs does.
            windows: their windows.

        Raises:
            LoopError: the gradients need a correction, and those that they were added to have had theirs.
        """
        self._since_step += 1
        for window in windows:
            if window._own.correction not in (None, 1.0) and self.phase in (Phase.COMPLETE, Phase.CLIPPED):
                self._enter(Phase.FAILED)
                raise LoopError(self._describe_late_backward())
            self._other_micro_batches.setdefault(window._own, 1.0)
        if not (self.in_context or self.backwards or self.is_decided):
            self.ends_here = ends

    def count_step(self, *, has_stepped: bool = False) -> bool:
        """Count a call of `optimizer.step()`; whether it is to apply the gradients, by `apply`.

        Args:
            has_stepped: whether the optimizer has applied gradients before.

        Raises:
            LoopError: outside `accumulate()`, it is called neither after every micro-batch nor after every window.
        """
        # Without accumulation every step applies the gradients of all backwards since the last one.
        applies = self.ends_here or (self.steps == 1 and not self.in_context and not self.is_decided)
        since, self._since_step = self._since_step, 0
        if not applies and not self._by_context and not self.is_decided and since > 1:
            raise LoopError(self._describe_early_step(since, has_stepped=has_stepped))
        return applies

    def decide(self, ends: bool) -> None:
        """Set whether the micro-batches from now on end their windows, until the next `accumulate()`."""
        self.is_decided, self.ends_here = True, ends
        self._own.are_all = ends and self._own.count > 0

    def resize(self, steps: int) -> None:
        """Set the number of micro-batches per window, from the next window on."""
        self.steps = steps
        if self._own.count == 0:
            self._own.divisor = self._own.most = steps

    def divide_by(self, divisor: int) -> None:
        """Divide the losses of the window by another number, also those that were accumulated already."""
        if divisor == self._own.divisor:
            return
        factor = self._own.divisor / divisor
        self._own.divisor = divisor
        if self.phase is Phase.ACCUMULATED and self._given is not None:
            self.session.scale_gradients(factor)
            self._other_micro_batches = {
                of: multiplied * factor for of, multiplied in self._other_micro_batches.items()
            }

    def begin(self) -> None:
        """Drop the gradients, and return to the state before the first micro-batch, after a checkpoint was loaded."""
        if isinstance(self._given, Session):
            self._drop(self._given)
        self.is_decided = False
        self._since_step = 0
        self._reopen()
        self.ends_here |= not self.in_context

    def _open(self) -> None:
        self.backwards = 0
        self._own = MicroBatches(self.steps, self.steps)
        self._by_context = False
        self.ends_here &= self.is_decided

    def _reopen(self) -> None:
        """Open the window again, inside `accumulate()` at the current micro-batch if a backward of it follows."""
        self._open()
        self._by_context = self.in_context
        if self.in_context:
            self._plan()

    def _plan(self) -> None:
        """Set the divisor to the number of micro-batches that the epoch still has for this window, if it is known."""
        if (self.plans_ahead or self.in_context) and self.steps > 1 and (left := self._progress.left) is not None:
            self._own.divisor = min(self.steps, left + 1)

    def _advance(self, *, is_new: bool = True) -> None:
        own, progress = self._own, self._progress
        if is_new:
            progress.advance(accumulates=self.steps > 1)
            if own.count == 0 and self.steps > 1:
                self._plan()
        if own.count:
            progress.warn_if_left(own.count, own.divisor)
        own.count += 1
        if not self.is_decided:
            self.ends_here = self._is_end(own.count, is_counted=True)
        own.are_all = self.ends_here

    def _is_end(self, batches: int, *, is_counted: bool) -> bool:
        progress = self._progress
        if batches >= self._own.most or (batches >= self._own.divisor and not progress.is_running):
            return True
        return progress.is_last if is_counted else progress.next_is_last

    def _describe_missing_step(self) -> str:
        n = self.steps
        if self._own.count < n:  # the epoch has ended earlier
            return (
                f"optimizer.step() was not called at the end of the epoch, whose last accumulation window has "
                f"{self._own.count} micro-batches; gradient_accumulation_steps is {n}.\n"
                "Call optimizer.step() after every backward: it acts where a window ends. Or step by hand "
                f"`if (i + 1) % {n} == 0 or i + 1 == len(loader)`."
            )
        return (
            f"backward() ran {self._since_step} times without optimizer.step(), but gradient_accumulation_steps is "
            f"{n}.\nCall optimizer.step() after every backward (it acts on every {n}th), or set "
            "gradient_accumulation_steps to the number of backwards between two steps of this loop."
        )

    def _describe_early_step(self, backwards: int, *, has_stepped: bool) -> str:
        n = self.steps
        found = f"optimizer.step() comes after {backwards} backwards, but gradient_accumulation_steps is {n}.\n"
        if has_stepped and not self._progress.is_running:
            return found + (
                f"The previous windows had {n}: if this is the end of the data, prepare() the loader, so that its end "
                "is known and the gradients are averaged over the shorter window."
            )
        return found + (
            f"Set gradient_accumulation_steps to {backwards}, or wrap each micro-batch in "
            "`with accelerator.accumulate(model):`."
        )

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Count a micro-batch, and accumulate the gradients of its loss.

        Args:
            loss: a scalar that depends on no other trained model.
            **kwargs: for `torch.autograd.backward`.

        Raises:
            LoopError: see `count_backward`, `open_backward` and `close_backward`.
        """
        session = self.session
        assert isinstance(session, Session), _ONLY_TRAINED
        if self.phase is Phase.FAILED:  # before the micro-batch is counted
            raise LoopError(FAILED_BACKWARD)
        self.count_backward()
        if self._own.divisor != 1:
            loss = loss / self._own.divisor
        is_first = self.open_backward(loss, ends_window=self.ends_here)
        try:
            torch.autograd.backward(session.scale_loss(loss), **kwargs)
        except BaseException as error:
            self.abandon_backward(reached=True)
            _raise_explained(session, error)
            raise
        reached = session.has_reached(loss, is_first=is_first)
        self.close_backward(reached=reached)
        if not reached and session.scales_loss:
            raise LoopError(LOSS_OF_OTHERS)

    def open_backward(self, loss: Tensor, *, ends_window: bool) -> bool:
        """Prepare the session for a backward whose loss may depend on the model.

        Call `close_backward` or `abandon_backward` afterwards.

        Returns:
            Whether no gradients were accumulated before this backward.

        Raises:
            LoopError: the model has gradients of another backward, or of one that failed.
        """
        session = self.session
        assert isinstance(session, Session), _ONLY_TRAINED
        if self.phase is Phase.FAILED:
            raise LoopError(FAILED_BACKWARD)
        is_first = self.phase in (Phase.EMPTY, Phase.APPLIED)
        if self._gradients_kept is None and self.phase is Phase.APPLIED:
            self._gradients_kept = session.drop_applied()
        session.open_backward(loss, ends_window=ends_window, is_first=is_first)
        return is_first

    def close_backward(self, *, reached: bool) -> None:
        """Called after a backward. Collective if `reached` and gradients are partitioned.

        Raises:
            LoopError: it has reached the model between `clip` and `step`; or see `Session.close_backward`.
        """
        session = self.session
        assert isinstance(session, Session), _ONLY_TRAINED
        try:
            session.close_backward(reached=reached)
            if not reached:
                return
            if self.phase in (Phase.EMPTY, Phase.ACCUMULATED, Phase.APPLIED):
                self._enter(Phase.ACCUMULATED)
            elif session.adds_to_complete_gradients and self.correction == 1.0:
                self._measured = Measured()
            else:
                raise LoopError(self._describe_late_backward())
        except BaseException as error:
            self._enter(Phase.FAILED)
            _raise_explained(session, error)
            raise

    def abandon_backward(self, *, reached: bool) -> None:
        """Called if the backward raised, and may have reached the model."""
        release_failed_backward()
        if self._trained.abandon_backward(reached=reached):
            self._enter(Phase.FAILED)

    def note_backward(self) -> None:
        """Note a backward that torch ran, for an optimizer whose model is not prepared.

        Raises:
            LoopError: the gradients are those of a step already, and were corrected to the window's size.
        """
        if self.phase not in (Phase.COMPLETE, Phase.CLIPPED):
            self._enter(Phase.ACCUMULATED)
        elif self.correction != 1.0:
            self._enter(Phase.FAILED)
            raise LoopError(self._describe_late_backward())

    def set_loss_scale(self, scale: float) -> None:
        """Change the loss scale, and rescale the accumulated gradients."""
        are_complete = self.phase in (Phase.COMPLETE, Phase.CLIPPED)
        self._trained.set_loss_scale(scale, accumulated=self.phase is Phase.ACCUMULATED, complete=are_complete)

    def clip(
        self, max_norm: float, *, norm_type: float = 2.0, only: list[Tensor] | None = None, call: str = CLIP_NORM
    ) -> Tensor:
        """See `Session.clip`; inside a window, where gradients are incomplete, nothing is clipped and nan is returned.

        Args:
            max_norm, norm_type, only: see `Session.clip`.
            call: what the script has called, for messages.

        Raises:
            LoopError: the step was already taken; or see `Session.clip`.
        """
        if not self.ends_here:
            return torch.tensor(float("nan"))
        if self.phase is Phase.APPLIED:
            raise LoopError(
                f"{call} was called after optimizer.step(), which has applied and cleared the gradients.\n"
                f"Call {call} after accelerator.backward(loss) and before optimizer.step()."
            )
        if self.phase is Phase.EMPTY and isinstance(self._given, Session):
            self._given.step_without_backward(is_again=False)
            return torch.tensor(0.0)
        self._completed_by = call
        self._complete()
        self._measured = self.session.clip(max_norm, norm_type=norm_type, only=only, measured=self._measured)
        if max_norm != float("inf"):
            self._enter(Phase.CLIPPED)
        assert self._measured.norm is not None, "clip measures the norm"
        return self._measured.norm

    def fail(self) -> None:
        """Called if a step raised before `apply`: its gradients must not be applied by a later one."""
        self._enter(Phase.FAILED)

    def first_nonfinite(self) -> str | None:
        """The name of the first parameter whose gradient is not finite, before `apply`; None if all are. Collective."""
        if self.phase in (Phase.EMPTY, Phase.APPLIED):
            return None
        self._complete()
        return self.session.first_nonfinite()

    def apply(self) -> bool | FoundInf:
        """Apply the gradients after `count_step`; whether the step was applied, see `Session.step`. Collective.

        Raises:
            LoopError: the gradients must not be applied; see `Session.step`.
        """
        applied: bool | FoundInf = True
        session = self._given
        if self.phase in (Phase.EMPTY, Phase.APPLIED):
            if session is not None:
                session.step_without_backward(
                    is_again=self.phase is Phase.APPLIED and self._gradients_kept is not False
                )
        else:
            self._complete()
            try:
                applied = self.session.step(self._measured, clips=self.phase is not Phase.CLIPPED)
            except BaseException as error:
                self._enter(Phase.FAILED)
                _raise_explained(self.session, error)
                raise
            self._gradients_kept = None
        self._enter(Phase.APPLIED)
        self.backwards = 0
        if not self.in_context:  # there the next accumulate() opens a window; a second step is of the same micro-batch
            self._own = MicroBatches(self.steps, self.steps)
        return applied

    def zero_grad(self) -> None:
        """Drop the gradients if this is called between a backward and its step, or after a failed backward.

        Elsewhere there is nothing to drop: `apply` clears the gradients, and inside a window they accumulate.

        Raises:
            LoopError: see `Session.agree_to_drop`.
        """
        self._gradients_kept = False
        if self.phase is Phase.FAILED or self.dropping_is_meant:
            if self.phase is Phase.ACCUMULATED and self.ends_here and isinstance(self._given, Session):
                try:
                    self._given.agree_to_drop()
                except BaseException:
                    self._enter(Phase.FAILED)
                    raise
            self._drop(self.session)
            self.restart()
        elif self.phase in (Phase.EMPTY, Phase.APPLIED):
            in_window = not self.ends_here and self.phase is not Phase.APPLIED
            self.session.drop_foreign_gradients(in_window=in_window)
            if isinstance(self.session, UnpreparedOptimizer):
                self._enter(Phase.EMPTY)  # the script may compute gradients itself, which are not seen here

    def restart(self) -> None:
        """Restart the window after gradients were dropped; inside `accumulate()` with the next backward."""
        self._since_step = 0
        if self.backwards:
            self._progress.repeat(self.backwards)
            self._reopen()

    def describe_kept_gradients(self) -> str | None:
        """What plain torch would do with the last step's gradients if the script has kept them; None if it has not.

        To be called before `count_step`.
        """
        if self._gradients_kept is False or not isinstance(self._given, Session):
            return None
        if self._since_step == 0:
            return (
                "optimizer.step() was called twice without a backward() between them: the second call does nothing. "
                "Plain PyTorch applies the same gradients again"
            )
        unsure = ", unless the script sets each p.grad = None, which cannot be detected under ZeRO"
        return (
            "zero_grad() was not called since the last applied step: its gradients were cleared nevertheless. Plain "
            f"PyTorch adds the next gradients to them{unsure if self._gradients_kept is None else ''}"
        )

    @property
    def _trained(self) -> Session:
        assert isinstance(self._given, Session), _ONLY_TRAINED
        return self._given

    def refuse_failed(self) -> None:
        """Refuse to continue with gradients that a failed backward or step has left.

        Raises:
            LoopError: there are such gradients.
        """
        if self.phase is Phase.FAILED:
            raise LoopError(FAILED_BACKWARD)

    def complete(self) -> None:
        """Make accumulated gradients those of the step; where there are none, or no session, nothing happens."""
        if self.phase is Phase.ACCUMULATED and self._given is not None:
            self._complete()

    def _complete(self) -> None:
        if self.phase is Phase.FAILED:
            raise LoopError(FAILED_BACKWARD)
        if self.phase not in (Phase.EMPTY, Phase.ACCUMULATED):
            return
        try:
            if self.phase is Phase.ACCUMULATED and (correction := self._settle_correction()) != 1.0:
                self.session.scale_gradients(correction)
            self._measured = self.session.complete_gradients()
        except BaseException as error:
            self._enter(Phase.FAILED)
            _raise_explained(self.session, error)
            raise
        self._enter(Phase.COMPLETE)

    def _describe_different_sizes(self) -> str:
        sizes = [("its own", self._own)] if self._own.count else []
        sizes += [("another model's", of) for of in self._other_micro_batches]
        found = ", ".join(f"{whose} has {of.count if of.are_all else of.divisor} micro-batches" for whose, of in sizes)
        return (
            "the gradients of a model are from accumulation windows of different sizes, which was not known when they "
            f"were added up: {found}.\n{_APART}"
        )

    def _describe_used_gradients(self) -> str:
        own, taken_for = self._own, round(self._own.divisor / (self._own.expected or 1.0))
        return (
            f"an accumulation window has {own.count} micro-batches, but gradients of their losses were in a step of "
            f"another model's optimizer before that was known, as if it had {taken_for}.\n{_APART}"
        )

    def _describe_late_backward(self) -> str:
        call = self._completed_by
        return (
            f"backward() after {call} and before optimizer.step(): {_TOO_LATE.get(call, _SCALED)}.\n"
            f"Call {call} after the window's last backward()."
        )

    def _settle_correction(self) -> float:
        """Return the correction of the step.

        The correction of another model's window that is still open has to come out as this one.
        """
        if not self._other_micro_batches and self._own.expected is None:
            return self._own.divisor / self._own.count if self._own.count else 1.0
        correction, own = self.correction, self._own
        if own.count and own.expected is not None and not math.isclose(own.expected, own.divisor / own.count):
            raise LoopError(self._describe_used_gradients())
        for micro_batches, multiplied in self._other_micro_batches.items():
            if micro_batches.correction is None:
                micro_batches.expected = correction * multiplied
        return correction

    def _drop(self, session: Session | UnpreparedOptimizer) -> None:
        if self.phase is Phase.FAILED:
            release_failed_backward()  # of the script itself
        session.drop_gradients(failed=self.phase is Phase.FAILED)
        self._enter(Phase.EMPTY)

    def _enter(self, phase: Phase) -> None:
        assert phase in NEXT_PHASES[self.phase], f"{self.phase} is not followed by {phase}"
        self.phase = phase
        if phase in (Phase.EMPTY, Phase.APPLIED):
            self._other_micro_batches = {}
        if phase not in (Phase.COMPLETE, Phase.CLIPPED):
            self._measured = Measured()


def _raise_explained(session: Session | UnpreparedOptimizer, error: BaseException) -> None:
    """Raise a clearer error in place of `error`, if the session knows one."""
    if (explained := session.explain(error)) is not None:
        raise explained from error


def _failing(reference: weakref.ref[Window]) -> Callable[[], None]:
    """What a session calls if a gradient is computed outside of the window's backward; it does not keep the window."""

    def fail() -> None:
        if (window := reference()) is not None:
            window.fail()

    return fail


def share_divisor(windows: Sequence[Window]) -> int:
    """The number that a loss of all these windows is divided by, before it is counted.

    If they would divide it by different ones, all divide by their `steps`, and correct that where they end.
    """
    if len({window.next_divisor for window in windows}) > 1:
        for window in windows:
            if window.next_divisor != window.steps:
                window.divide_by(window.steps)
    return windows[0].next_divisor


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
