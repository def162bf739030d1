"""`Window`: the phase and the counts of one accumulation window of a model. This module calls no session.

`loop/backward.py`, `loop/clip.py` and `loop/step.py` have a function for each act of a loop on a window and the session
of its model. `loop/together.py` has the functions for several trained models.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Final

from zero_plugin.data.active import LoaderProgress
from zero_plugin.errors import LoopError
from zero_plugin.loop import window_errors
from zero_plugin.strategies.precision import Measured

CLIP_NORM: Final = "clip_grad_norm_()"
CLIP_VALUE: Final = "clip_grad_value_()"


class Phase(enum.Enum):
    """The state of a window's gradients.

    `NEXT_PHASES` has the legal transitions. A call that does not fit the phase raises a `LoopError`, or has no effect
    if the function's docstring says so.
    """

    EMPTY = enum.auto()
    """No backward has reached the model since the gradients were dropped."""

    ACCUMULATED = enum.auto()
    """Backwards have reached the model; gradients are divided by `Window.divisor`, and may have a loss scale."""

    COMPLETE = enum.auto()
    """The gradients are the step's: averaged over processes and micro-batches, and without a loss scale."""

    CLIPPED = enum.auto()
    """The gradients are complete, and the script has clipped them."""

    APPLIED = enum.auto()
    """The step was taken, or skipped. Scripts may read the gradients until the next backward."""

    FAILED = enum.auto()
    """A backward or a step raised and left gradients that must not be applied."""


NEXT_PHASES: Final[Mapping[Phase, frozenset[Phase]]] = {
    Phase.EMPTY: frozenset({Phase.EMPTY, Phase.ACCUMULATED, Phase.COMPLETE, Phase.APPLIED, Phase.FAILED}),
    Phase.ACCUMULATED: frozenset({Phase.EMPTY, Phase.ACCUMULATED, Phase.COMPLETE, Phase.FAILED}),
    Phase.COMPLETE: frozenset({Phase.EMPTY, Phase.COMPLETE, Phase.CLIPPED, Phase.APPLIED, Phase.FAILED}),
    Phase.CLIPPED: frozenset({Phase.EMPTY, Phase.CLIPPED, Phase.APPLIED, Phase.FAILED}),
    Phase.APPLIED: frozenset({Phase.EMPTY, Phase.ACCUMULATED, Phase.APPLIED, Phase.FAILED}),
    Phase.FAILED: frozenset({Phase.EMPTY, Phase.FAILED}),
}


class Place(enum.Enum):
    """The position of the loop in its window. `zero_grad()` and the next backward depend only on this position.

    Attributes:
        drops: the gradients that `zero_grad()` drops between a backward and its step: `all`, `none`, or `foreign` (from
            other models' windows). Loops also call `zero_grad()` at their start, or after each micro-batch.
    """

    drops: str

    IN_BATCH = ("in a micro-batch of accumulate()", "foreign")
    LAST_BATCH = ("in the window's last accumulate(), after a backward", "all")  # the script may skip the step
    BETWEEN_BATCHES = ("between two accumulate() of one window", "foreign")
    AFTER_BATCHES = ("after the window's last accumulate()", "all")
    BY_HAND = ("in a loop without accumulate()", "all")
    SCRIPT_OPEN = ("the script has set that the window continues", "none")
    SCRIPT_END = ("the script has set that the window ends", "all")

    def __init__(self, _: str, drops: str) -> None:
        self.drops = drops


@dataclass(eq=False)
class MicroBatches:
    """The micro-batches of one accumulation window.

    Attributes:
        divisor: losses are divided by this number: the planned size, according to `len(loader)` when the window opened.
        most: the size of the window if the epoch is longer than `len(loader)`.
        count: the micro-batches so far.
        are_all: whether the window has ended.
        expected: the correction with which a step of another model has used these gradients before the window ended.
    """

    divisor: int
    most: int
    count: int = 0
    are_all: bool = False
    expected: float | None = None

    @property
    def correction(self) -> float | None:
        """The factor that corrects the divisor to the real count; None while the window is open and unused."""
        return self.divisor / self.count if self.are_all else self.expected


class Window:
    """The counts of a model's micro-batches, and the phase of its gradients.

    A window has `steps` micro-batches; the last window of an epoch may have fewer. Micro-batches are counted in one of
    three ways:

    * With `accumulate()`, which returns the window as a context manager, each entry counts (`enter_batch`).
    * Without `accumulate()`, each backward counts.
    * If the script sets whether the window ends (`decide`), nothing is counted until the next `accumulate()`.

    The loss of each micro-batch is divided by the actual size of the window, if the loader knows its length when the
    window opens. Otherwise the loss is divided by `steps`; if the window was shorter, the accumulated gradients are
    multiplied by `divisor / count` when they are completed.

    Args:
        steps: micro-batches per optimizer step, at least 1.
        progress: the loop's position in the epochs of the prepared loaders.

    Attributes:
        steps: micro-batches per optimizer step, from the next window on.
        plans_ahead: whether losses are divided by the actual size, if known, outside `accumulate()` too. False with
            several models: there, only the finished backward shows which model a micro-batch belongs to.
        in_context: whether the loop is inside `accumulate()`.
        ends_here: whether the current micro-batch is the window's last: then `step()` applies the gradients.
        is_decided: whether the script has set `ends_here`.
        phase: the state of the gradients.
        measured: facts about COMPLETE gradients, such as their norm.
        clipping: the configured norm at which steps clip; infinite for no clipping.
        typed_clipping: the norm that the user typed; None if it is open, and the script may choose.
        completed_by: the last call of the script that needs the gradients COMPLETE.
        keeps_gradients: whether the gradients of the last step are still in `p.grad`, because the script has not called
            zero_grad(). None after a step, until the next backward shows it (under ZeRO, always None).
        own: the micro-batches of this window.
        others: micro-batches of other models' windows that also contributed to the accumulated gradients -> the factor
            by which these gradients were multiplied since; see `loop/together.py`.
        backwards: backwards of the window that no step has applied yet.
        since_step: backwards since the last call of step(), including backwards of other models' micro-batches.
    """

    def __init__(self, steps: int, progress: LoaderProgress | None = None) -> None:
        self.steps = steps
        self.plans_ahead = True
        self._progress = LoaderProgress() if progress is None else progress
        self.phase = Phase.EMPTY
        self.measured = Measured()
        self.clipping = inf
        self.typed_clipping: float | None = None
        self.completed_by = CLIP_NORM
        self.keeps_gradients: bool | None = False
        self.in_context = False
        self._by_context = False  # this window's micro-batches are counted by accumulate()
        self.is_decided = False
        self.ends_here = True  # before the first micro-batch, as after a window
        self.own = MicroBatches(steps, steps)
        self.others: dict[MicroBatches, float] = {}
        self.backwards = 0
        self._before_batch = 0  # backwards of the window before the last entry of accumulate()
        self.since_step = 0

    # ---- the position of the loop ------------------------------------------------------------------------------------

    @property
    def divisor(self) -> int:
        """The divisor of the current micro-batch's loss."""
        return self.own.divisor

    @property
    def next_divisor(self) -> int:
        """The divisor of the next backward's loss, before this backward is counted; for several models."""
        opens = not self.in_context and (self._by_context or self.own.count == 0 or self.steps == 1)
        return self.steps if opens else self.own.divisor

    @property
    def holds_gradients(self) -> bool:
        """Whether the model has accumulated gradients of this window that no step has applied yet."""
        return self.backwards > 0

    @property
    def is_begun(self) -> bool:
        """Whether micro-batches of this window were counted, and their gradients are not applied yet."""
        return self.holds_gradients or (self.own.count > 0 and not self.ends_here)

    @property
    def place(self) -> Place:
        """The position of the loop in the window."""
        if self.is_decided and not self.ends_here:
            return Place.SCRIPT_OPEN
        if self.in_context:
            is_last = self.ends_here and self.backwards > self._before_batch
            return Place.LAST_BATCH if is_last else Place.IN_BATCH
        if self.is_decided:
            return Place.SCRIPT_END
        if self._by_context:
            return Place.AFTER_BATCHES if self.ends_here else Place.BETWEEN_BATCHES
        return Place.BY_HAND

    @property
    def dropping_is_meant(self) -> bool:
        """Whether a `zero_grad()` now would be between a backward and its step, and must drop gradients."""
        if self.since_step == 0:
            return False
        drops = self.place.drops
        return drops == "all" or (drops == "foreign" and self.backwards == 0)

    @property
    def next_backward_ends(self) -> bool:
        """Whether the next backward is the last of the window. Valid before the forward of its micro-batch."""
        match self.place:
            case Place.IN_BATCH | Place.LAST_BATCH if self.own.count == 0 and not self.is_decided:
                return self._is_end(1, is_counted=True)  # the window was opened again at this micro-batch
            case Place.BETWEEN_BATCHES | Place.BY_HAND:
                return self._is_end(self.own.count + 1, is_counted=False)
            case Place.AFTER_BATCHES:  # the backward is the first of the window after this one
                return self.steps == 1 or self._progress.next_is_last
            case _:
                return self.ends_here

    @property
    def step_norm(self) -> float:
        """The norm at which the step clips: the script's, if it has clipped, or the configured one; infinite for none.

        A session that clips immediately has no limit left for the step.
        """
        return self.measured.limit if self.phase is Phase.CLIPPED else self.clipping

    # ---- counting ----------------------------------------------------------------------------------------------------

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
        """Leave the micro-batch when `accumulate()` is exited."""
        self.in_context = False

    __enter__, __exit__ = enter_batch, leave_batch

    def count_backward(self) -> None:
        """Count a backward; outside `accumulate()` it is one micro-batch.

        Raises:
            LoopError: outside `accumulate()`, more backwards ran without `step()` than the window has micro-batches, or
                two backwards ran in one batch of a prepared loader.
        """
        self.since_step += 1
        if self.in_context:
            self.backwards += 1
            if self.own.count == 0:  # the window was opened again at this micro-batch
                self._advance(is_new=False)
            return
        if self._by_context or self.own.count == 0 or self.steps == 1:
            self._open()
        elif self.ends_here and self.own.count >= self.own.divisor and not self.is_decided:
            raise window_errors.missing_step(self.steps, self.own.count, self.since_step)
        self.backwards += 1
        self._advance()
        if not self._progress.is_own and self.steps > 1 and not self.is_decided:
            raise window_errors.two_backwards_in_a_batch(self.steps)

    def count_step(self, *, has_stepped: bool = False) -> bool:
        """Count a call of `optimizer.step()`; return whether this call must apply the gradients.

        Args:
            has_stepped: whether the optimizer has applied gradients before.

        Raises:
            LoopError: outside `accumulate()`, the loop calls it neither after every micro-batch nor after every window.
        """
        # Without accumulation every step applies the gradients of all backwards since the last one.
        applies = self.ends_here or (self.steps == 1 and not self.in_context and not self.is_decided)
        since, self.since_step = self.since_step, 0
        if not applies and not self._by_context and not self.is_decided and since > 1:
            is_at_the_end = has_stepped and not self._progress.is_running
            raise window_errors.early_step(self.steps, since, may_be_the_end=is_at_the_end)
        return applies

    def decide(self, ends: bool) -> None:
        """Set whether the micro-batches from now on end their windows, until the next `accumulate()`."""
        self.is_decided, self.ends_here = True, ends
        self.own.are_all = ends and self.own.count > 0

    def resize(self, steps: int) -> None:
        """Set the number of micro-batches per window, from the next window on."""
        self.steps = steps
        if self.own.count == 0:
            self.own.divisor = self.own.most = steps

    # ---- the phase ---------------------------------------------------------------------------------------------------

    def enter(self, phase: Phase) -> None:
        """Enter the next phase, which must be one of `NEXT_PHASES`."""
        assert phase in NEXT_PHASES[self.phase], f"{self.phase} is not followed by {phase}"
        self.phase = phase
        if phase in (Phase.EMPTY, Phase.APPLIED):
            self.others = {}
        if phase not in (Phase.COMPLETE, Phase.CLIPPED):
            self.measured = Measured()

    def finish(self) -> None:
        """End the window after its step."""
        self.enter(Phase.APPLIED)
        self.backwards = 0
        # Inside accumulate() the counts stay: a second step belongs to the same micro-batch, and the next accumulate()
        # opens a window.
        if not self.in_context:
            self.own = MicroBatches(self.steps, self.steps)

    def restart(self) -> None:
        """Restart the window after gradients were dropped; inside `accumulate()` it begins with the next backward."""
        self.since_step = 0
        if self.backwards:
            self._progress.repeat(self.backwards)
            self._reopen()

    def begin(self) -> None:
        """Return to the state before the first micro-batch, after a checkpoint was loaded."""
        self.is_decided = False
        self.since_step = 0
        self._reopen()
        self.ends_here |= not self.in_context

    def _open(self) -> None:
        self.backwards = 0
        self.own = MicroBatches(self.steps, self.steps)
        self._by_context = False
        self.ends_here &= self.is_decided

    def _reopen(self) -> None:
        """Open the window again; inside `accumulate()` at the current micro-batch, if another backward follows."""
        self._open()
        self._by_context = self.in_context
        if self.in_context:
            self._plan()

    def _plan(self) -> None:
        """Set the divisor to the number of micro-batches that the epoch still has for this window, if known."""
        if (self.plans_ahead or self.in_context) and self.steps > 1 and (left := self._progress.left) is not None:
            self.own.divisor = min(self.steps, left + 1)

    def _advance(self, *, is_new: bool = True) -> None:
        own, progress = self.own, self._progress
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
        # The divisor is the planned size. An epoch may be longer than `len(loader)`: while a loop runs, only its last
        # batch or `most` micro-batches end the window.
        if batches >= self.own.most or (batches >= self.own.divisor and not progress.is_running):
            return True
        return progress.is_last if is_counted else progress.next_is_last
