"""Where the loop stands in its accumulation window: which micro-batch, how large the window, whether it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from zero_plugin.distributed.collectives import announce
from zero_plugin.errors import LoopError


class Epoch(Protocol):
    """What a prepared loader tells while it is iterated."""

    @property
    def batches_left(self) -> int | None:
        """Batches still to come in this epoch after the last one fetched; None where the length is unknown."""

    end_of_dataloader: bool
    """Whether the last one fetched is the epoch's last."""

    position: int
    """Index in the loop of the last one fetched; -1 before the first."""


class CountBatch(Protocol):
    """Counts micro-batches beside the batches of the prepared loaders that are being iterated."""

    def __call__(self, *, accumulates: bool) -> bool:
        """One more; see `AccumulationWindow`."""


class AccumulationWindow:
    """Counts one model's micro-batches into windows of `steps`; the last window of an epoch may be shorter.

    A loop tells its micro-batches in one of three ways. Under `accumulate()`, which hands out the window as a context
    manager, each entry is one (`enter_batch`). By hand, each `backward` is one (`count_backward`). Or it says itself,
    by `decide`, whether the window ends, and no micro-batch is counted until the next `accumulate()`.

    The loss of each micro-batch is divided by the window's true size, where the loader knows its length when the window
    opens. Where it does not, the loss is divided by `steps`, and `correction` tells by what the summed gradients have
    to be multiplied once the window proved shorter. So too in the first window of a loop that fetches batches before it
    computes them: they may also be batches that it leaves out.

    Args:
        steps: micro-batches per optimizer step, at least 1.
        running_epoch: the prepared loader that is being iterated now; its end ends the window too.
        count_batch: told of each micro-batch, and whether there are several in a window; says whether it has a batch of
            its own of a prepared loader that is being iterated, or none is.

    Attributes:
        ends_here: whether the current micro-batch is the window's last, so that `step()` applies it.
        in_context: whether the loop is inside `accumulate()`.
        plans_ahead: whether a loss is divided by the true size where it is known. Not where one loss may be a
            micro-batch of several models, whose windows need not end together: `steps` divides it then.
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
        self._dropped = 0  # micro-batches that the loop may compute again, without fetching others
        self._size = steps  # micro-batches of the window, as far as the length tells when it opens
        self._most = steps  # micro-batches of the window, where the epoch goes on longer than its length said
        self._batches = 0  # of them seen so far
        self._decided: bool | None = None  # what the script said of the window's end
        self.ends_here = True  # before the first micro-batch, as after a window
        self._stepped = False  # the window ended and was applied; the next micro-batch opens a new one
        self._counted_by_context = False  # this window's micro-batches come from accumulate()
        self._since_step = 0  # backwards since the loop last called step()
        self._backwards = 0  # of the window
        self._ended_windows = 0
        self._epoch: Epoch | None = None  # of the last micro-batch
        self._position = -1  # in it
        self._ahead = 0  # batches that the loop had fetched then beyond the micro-batch's own
        self._fetches_ahead = False  # it is known to compute them, and has not left them out
        self._told = False
        self._is_own = True  # the last micro-batch has a batch of its own

    @property
    def is_decided(self) -> bool:
        """Whether the script counts its micro-batches itself, and has said whether the window ends."""
        return self._decided is not None

    @property
    def divisor(self) -> int:
        """What the loss of the current micro-batch is divided by."""
        return self._size

    @property
    def next_backward_ends(self) -> bool:
        """The same, asked before the forward of a micro-batch whose backward has not been counted yet."""
        if self.in_context:
            return self.ends_here
        batches, size, most = (
            (1, self.steps, self.steps) if self._stepped else (self._batches + 1, self._size, self._most)
        )
        return self._is_end(batches, size, most, self._running_epoch(), is_counted=False)

    @property
    def is_applied(self) -> bool:
        """Whether the step that ended the window was the last thing to happen: no gradients have come since."""
        return self._stepped and self._since_step == 0

    @property
    def holds_gradients(self) -> bool:
        """Whether the model has gradients of its own micro-batches that no step has applied yet."""
        return self._backwards > 0 and not self._stepped

    @property
    def correction(self) -> float:
        """Factor on the window's gradients that makes their divisor the true number of micro-batches."""
        return self._size / self._batches if self._batches else 1.0

    @property
    def dropping_is_meant(self) -> bool:
        """Whether `zero_grad()` called now stands between a backward and its step, and so drops gradients.

        Loops also call it first thing, or after each of their micro-batches; there it means nothing.
        """
        if self._decided is False:
            return False
        if self.in_context or (self._counted_by_context and not self.ends_here):
            return self._since_step > self._backwards == 0  # left by another model's loss, after the last window's step
        return self._since_step > 0

    def enter_batch(self) -> None:
        """`accumulate()` was entered: one more micro-batch."""
        if self.in_context:
            raise LoopError("accumulate() is entered inside accumulate(); leave the first one before the next batch.")
        self._decided = None
        if self.ends_here:
            self._open()
        self.in_context = self._counted_by_context = True
        self._advance()

    def leave_batch(self) -> None:
        """`accumulate()` was left."""
        self.in_context = False

    def __enter__(self) -> None:
        self.enter_batch()

    def __exit__(self, *_: object) -> None:
        self.leave_batch()

    def count_backward(self) -> None:
        """A backward ran; outside `accumulate()` it is one micro-batch.

        Raises:
            LoopError: by hand, more backwards than the window has micro-batches and no `step()` between them, or a
                second one in one batch of a prepared loader.
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
                f"gradient_accumulation_steps is {self.steps}: it cannot be told whether these are two micro-batches, "
                "or two losses of one.\nWrap each micro-batch in `with accelerator.accumulate(model):`, with one "
                "backward() inside where the loop cuts the loader's batches, or with all of a batch's losses inside."
            )

    def count_foreign_backward(self) -> None:
        """Gradients came from a loss that is no micro-batch of this window's model: it only runs through it."""
        self._since_step += 1

    def count_step(self) -> bool:
        """`optimizer.step()` was called: whether it applies the gradients.

        Raises:
            LoopError: by hand, steps come at a cadence that is neither every micro-batch nor every window.
        """
        # Without accumulation every step applies whatever was added up, however many backwards that took.
        applies = self.ends_here or (self.steps == 1 and not self.in_context and self._decided is None)
        since, self._since_step = self._since_step, 0
        if not applies and not self._counted_by_context and self._decided is None and since > 1:
            raise LoopError(self._describe_early_step(since))
        self._ended_windows += applies
        self._stepped = applies
        return applies

    def decide(self, ends: bool) -> None:
        """The script says whether the micro-batches from now on end their window, until the next `accumulate()`."""
        self._decided = self.ends_here = ends

    def resize(self, steps: int) -> None:
        """Windows have `steps` micro-batches, from the next one on."""
        self.steps = steps
        if self._batches == 0 or self._stepped:
            self._size = self._most = steps

    def begin(self) -> None:
        """The training goes on from elsewhere: stand as before the first micro-batch."""
        self._decided = None
        self._since_step = self._ended_windows = 0
        self._open()
        if self.in_context:
            self._counted_by_context = True
            self._advance(is_new=False)
        else:
            self.ends_here = True

    def restart(self) -> None:
        """The gradients were dropped; inside `accumulate()` this micro-batch is the first of the window then."""
        self._since_step = 0
        if self._backwards:
            self._dropped += self._backwards
            self._open()
            if self.in_context:
                self._counted_by_context = True
                self._advance(is_new=False)

    def _describe_missing_step(self) -> str:
        n = self.steps
        if self._batches < n:  # the epoch has ended before
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
                f"The windows before had {n}: where this is the end of the data, prepare() the loader, so that its end "
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
            elif self._batches and epoch is self._epoch and epoch.position < self._position and not self._told:
                self._told = True
                announce(
                    f"an epoch was left after {self._batches} of the {self._size} micro-batches of an accumulation "
                    "window (by break, or zipped with a shorter loader): the window goes on in the next epoch"
                )
            self._epoch, self._position = epoch, epoch.position
        self._batches += 1
        self.ends_here = self._is_end(self._batches, self._size, self._most, epoch, is_counted=True)

    def _look_ahead(self, epoch: Epoch) -> tuple[int, bool]:
        """Batches fetched beyond those computed, the next micro-batch's included, and whether they will be computed.

        A loop may fetch a window's batches before it computes them: the position jumps, then rests. A jump with no rest
        after it is batches that the loop left out.
        """
        goes_on = epoch is self._epoch and epoch.position >= self._position
        fetched = epoch.position - self._position if goes_on else epoch.position + 1
        if fetched == 0 and self._ahead:
            return self._ahead - 1, True
        if fetched == 0 and self._fetches_ahead:  # of another epoch of as many batches
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
    """One micro-batch of several models: what `accumulate()` hands out for them."""

    def __init__(self, windows: Sequence[AccumulationWindow]) -> None:
        self._windows = windows

    def __enter__(self) -> None:
        for window in self._windows:
            window.enter_batch()

    def __exit__(self, *_: object) -> None:
        for window in self._windows:
            window.leave_batch()
