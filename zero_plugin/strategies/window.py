"""`AccumulationWindow`: counts micro-batches, and decides where a window of gradient accumulation ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from zero_plugin.distributed.collectives import announce
from zero_plugin.errors import LoopError


class Epoch(Protocol):
    """The progress of a prepared loader while it is iterated."""

    @property
    def batches_left(self) -> int | None:
        """The number of batches after the last fetched one in this epoch; None if the length is unknown."""

    end_of_dataloader: bool
    """Whether the last fetched batch is the last one of the epoch."""

    position: int
    """The index of the last fetched batch in the epoch; -1 before the first."""


class CountBatch(Protocol):
    """Compares the micro-batches with the batches of the prepared loaders that are being iterated."""

    def __call__(self, *, accumulates: bool) -> bool:
        """Count a micro-batch; see `AccumulationWindow`."""


class AccumulationWindow:
    """Counts one model's micro-batches into windows of `steps`; the last window of an epoch may be shorter.

    Micro-batches are counted in one of three ways. With `accumulate()`, which returns the window as a context manager,
    each entry is one (`enter_batch`). Without it, each `backward` is one (`count_backward`). Or the script sets whether
    the window ends (`decide`), and no micro-batch is counted until the next `accumulate()`.

    The loss of each micro-batch is divided by the actual size of the window, if the loader knows its length when the
    window opens. Otherwise it is divided by `steps`, and if the window was shorter, the accumulated gradients must be
    multiplied by `correction`. The same holds in the first window of a loop that fetches several batches before it
    computes them, since the loop may also skip them.

    Args:
        steps: micro-batches per optimizer step, at least 1.
        running_epoch: returns the prepared loader that is being iterated; the end of its epoch ends the window too.
        count_batch: called for each micro-batch, with whether a window has several; returns whether the micro-batch has
            its own batch of a prepared loader, or no prepared loader is being iterated.

    Attributes:
        ends_here: whether the current micro-batch is the window's last, so that `step()` applies the gradients.
        in_context: whether the loop is inside `accumulate()`.
        plans_ahead: whether losses are divided by the actual size if it is known. False if one loss may be a
            micro-batch of several models, whose windows may end at different times: then they are divided by `steps`.
    """

    def __init__(
        self,
        steps: int,
        running_epoch: Callable[[], Epoch | None] = lambda: None,
        count_batch: CountBatch = lambda *, accumulates: True,  # noqa: ARG005
    ) -> None:
        self.steps = steps
        self.in_context = False
        self.plans_ahead = True
        self._running_epoch = running_epoch
        self._count_batch = count_batch
        self._dropped = 0  # dropped micro-batches, which the loop may compute again without fetching others
        self._size = steps  # micro-batches of the window, by the length of the epoch when the window opened
        self._most = steps  # micro-batches of the window if the epoch is longer than its length said
        self._batches = 0  # micro-batches of the window so far
        self._decided: bool | None = None  # whether the window ends, if the script has set it
        self.ends_here = True  # before the first micro-batch, as after a window
        self._stepped = False  # the window's step was taken; the next micro-batch opens a new one
        self._counted_by_context = False  # this window's micro-batches are counted by accumulate()
        self._since_step = 0  # backwards since the last call of step()
        self._backwards = 0  # backwards of the window
        self._ended_windows = 0
        self._epoch: Epoch | None = None  # the epoch of the last micro-batch
        self._position = -1  # its position in that epoch
        self._ahead = 0  # batches that the loop had fetched beyond the one of that micro-batch
        self._fetches_ahead = False  # whether the loop is known to compute those, not to skip them
        self._has_warned = False
        self._is_own = True  # whether the last micro-batch has its own batch

    @property
    def is_decided(self) -> bool:
        """Whether the script has set whether the window ends."""
        return self._decided is not None

    @property
    def divisor(self) -> int:
        """The number that the loss of the current micro-batch is divided by."""
        return self._size

    @property
    def next_backward_ends(self) -> bool:
        """Whether the next backward is the last of the window, before the forward of its micro-batch."""
        if self.in_context:
            return self.ends_here
        batches, size, most = (
            (1, self.steps, self.steps) if self._stepped else (self._batches + 1, self._size, self._most)
        )
        return self._is_end(batches, size, most, self._running_epoch(), is_counted=False)

    @property
    def is_applied(self) -> bool:
        """Whether the window's step was taken, and no backward has run since."""
        return self._stepped and self._since_step == 0

    @property
    def holds_gradients(self) -> bool:
        """Whether the model has accumulated gradients that no step has applied yet."""
        return self._backwards > 0 and not self._stepped

    @property
    def correction(self) -> float:
        """The factor on the accumulated gradients that corrects their divisor to the actual number of micro-batches."""
        return self._size / self._batches if self._batches else 1.0

    @property
    def dropping_is_meant(self) -> bool:
        """Whether `zero_grad()`, called now, is between a backward and its step, so that it drops gradients.

        Loops also call it at their start, or after each micro-batch, where it must not drop gradients.
        """
        if self._decided is False:
            return False
        if self.in_context or (self._counted_by_context and not self.ends_here):
            return self._since_step > self._backwards == 0  # only foreign gradients, since the last window's step
        return self._since_step > 0

    def enter_batch(self) -> None:
        """Count a micro-batch when `accumulate()` is entered."""
        if self.in_context:
            raise LoopError("accumulate() is entered inside accumulate(); exit the first one before the next batch.")
        self._decided = None
        if self.ends_here:
            self._open()
        self.in_context = self._counted_by_context = True
        self._advance()

    def leave_batch(self) -> None:
        """Called when `accumulate()` is exited."""
        self.in_context = False

    def __enter__(self) -> None:
        self.enter_batch()

    def __exit__(self, *_: object) -> None:
        self.leave_batch()

    def count_backward(self) -> None:
        """Count a backward; outside `accumulate()` it is one micro-batch.

        Raises:
            LoopError: outside `accumulate()`, more backwards ran without `step()` than the window has micro-batches, or
                a second one ran in one batch of a prepared loader.
        """
        self._since_step += 1
        if self.in_context:
            self._backwards += 1
            return
        if self._counted_by_context or self._stepped or self.steps == 1:
            self._open()
        elif self.ends_here and self._batches >= self._size and self._decided is None:
            raise LoopError(self._describe_missing_step())
        self._backwards += 1
        self._advance()
        if not self._is_own and self.steps > 1 and self._decided is None:
            raise LoopError(
                "backward() ran twice in one batch of the prepared loader, outside accumulate(), and "
                f"gradient_accumulation_steps is {self.steps}: it is ambiguous whether these are two micro-batches, or "
                "two losses of one.\nWrap each micro-batch in `with accelerator.accumulate(model):`, with one "
                "backward() inside if the loop splits the loader's batches, or with all losses of a batch inside."
            )

    def count_foreign_backward(self) -> None:
        """Count a backward that computed gradients of this model in a micro-batch of another model."""
        self._since_step += 1

    def count_step(self) -> bool:
        """Count a call of `optimizer.step()`; whether it applies the gradients.

        Raises:
            LoopError: outside `accumulate()`, it is called neither after every micro-batch nor after every window.
        """
        # Without accumulation every step applies the gradients of all backwards since the last one.
        applies = self.ends_here or (self.steps == 1 and not self.in_context and self._decided is None)
        since, self._since_step = self._since_step, 0
        if not applies and not self._counted_by_context and self._decided is None and since > 1:
            raise LoopError(self._describe_early_step(since))
        self._ended_windows += applies
        self._stepped = applies
        return applies

    def decide(self, ends: bool) -> None:
        """Set whether the micro-batches from now on end their window, until the next `accumulate()`."""
        self._decided = self.ends_here = ends

    def resize(self, steps: int) -> None:
        """Set the number of micro-batches per window, from the next window on."""
        self.steps = steps
        if self._batches == 0 or self._stepped:
            self._size = self._most = steps

    def begin(self) -> None:
        """Reset to the state before the first micro-batch, after a checkpoint was loaded."""
        self._decided = None
        self._since_step = self._ended_windows = 0
        self._open()
        if self.in_context:
            self._counted_by_context = True
            self._advance(is_new=False)
        else:
            self.ends_here = True

    def restart(self) -> None:
        """Restart the window after gradients were dropped; inside `accumulate()` at the current micro-batch."""
        self._since_step = 0
        if self._backwards:
            self._dropped += self._backwards
            self._open()
            if self.in_context:
                self._counted_by_context = True
                self._advance(is_new=False)

    def _describe_missing_step(self) -> str:
        n = self.steps
        if self._batches < n:  # the epoch has ended earlier
            return (
                f"optimizer.step() was not called at the end of the epoch, whose last accumulation window has "
                f"{self._batches} micro-batches; gradient_accumulation_steps is {n}.\n"
                "Call optimizer.step() after every backward: it acts where a window ends. Or step by hand "
                f"`if (i + 1) % {n} == 0 or i + 1 == len(loader)`."
            )
        return (
            f"backward() ran {self._since_step} times without optimizer.step(), but gradient_accumulation_steps is "
            f"{n}.\nCall optimizer.step() after every backward (it acts on every {n}th), or set "
            "gradient_accumulation_steps to the number of backwards between two steps of this loop."
        )

    def _describe_early_step(self, backwards: int) -> str:
        n = self.steps
        found = f"optimizer.step() comes after {backwards} backwards, but gradient_accumulation_steps is {n}.\n"
        if self._ended_windows and self._running_epoch() is None:
            return found + (
                f"The previous windows had {n}: if this is the end of the data, prepare() the loader, so that its end "
                "is known and the gradients are averaged over the shorter window."
            )
        return found + (
            f"Set gradient_accumulation_steps to {backwards}, or wrap each micro-batch in "
            "`with accelerator.accumulate(model):`."
        )

    def _open(self) -> None:
        self._backwards = 0
        self._batches = 0
        self._size = self._most = self.steps
        self.ends_here = False
        self._stepped = False
        self._counted_by_context = False

    def _advance(self, *, is_new: bool = True) -> None:
        epoch = self._running_epoch()
        if is_new:
            self._is_own = self._count_batch(accumulates=self.steps > 1) or self._dropped > 0
            self._dropped = max(0, self._dropped - 1)
        if epoch is not None:
            if self.steps > 1 and is_new:
                self._ahead, self._fetches_ahead = self._look_ahead(epoch)
            plans = self._batches == 0 and self.plans_ahead and self.steps > 1
            if plans and (self._ahead == 0 or self._fetches_ahead):
                left = epoch.batches_left
                self._size = self.steps if left is None else min(self.steps, self._ahead + left + 1)
            elif self._batches and epoch is self._epoch and epoch.position < self._position and not self._has_warned:
                self._has_warned = True
                announce(
                    f"an epoch was left after {self._batches} of the {self._size} micro-batches of an accumulation "
                    "window (by break, or zipped with a shorter loader): the window continues in the next epoch"
                )
            self._epoch, self._position = epoch, epoch.position
        self._batches += 1
        self.ends_here = self._is_end(self._batches, self._size, self._most, epoch, is_counted=True)

    def _look_ahead(self, epoch: Epoch) -> tuple[int, bool]:
        """The number of batches fetched beyond that of the next micro-batch, and whether they will be computed.

        If a loop fetches a window's batches before it computes them, the position jumps, and then does not change for
        some micro-batches. If it keeps jumping, the loop skips batches.
        """
        goes_on = epoch is self._epoch and epoch.position >= self._position
        fetched = epoch.position - self._position if goes_on else epoch.position + 1
        if fetched == 0 and self._ahead:
            return self._ahead - 1, True
        if fetched == 0 and self._fetches_ahead:  # a new epoch at the same position
            fetched = epoch.position + 1
        return max(0, fetched - 1), self._fetches_ahead and epoch is self._epoch and fetched > 1

    def _is_end(self, batches: int, size: int, most: int, epoch: Epoch | None, *, is_counted: bool) -> bool:
        if self._decided is not None:
            return self._decided
        if batches >= most:
            return True
        if epoch is None:
            return batches >= size
        if batches == 0 or not epoch.end_of_dataloader:
            return False
        ahead, is_computed = (self._ahead, self._fetches_ahead) if is_counted else self._look_ahead(epoch)
        return not (ahead and is_computed)


class TogetherWindows:
    """The context manager of `accumulate()` for one micro-batch of several models."""

    def __init__(self, windows: Sequence[AccumulationWindow]) -> None:
        self._windows = windows

    def __enter__(self) -> None:
        for window in self._windows:
            window.enter_batch()

    def __exit__(self, *_: object) -> None:
        for window in self._windows:
            window.leave_batch()
