"""The accumulation window: when a step acts and what a loss is divided by."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from zero_plugin.accumulation import AccumulationWindow
from zero_plugin.errors import LoopError


@dataclass
class FakeEpoch:
    """An epoch of `length` batches; `known` tells whether it knows its length."""

    length: int
    known: bool = True
    batch: int = -1

    @property
    def position(self) -> int:
        return self.batch

    @property
    def batches_left(self) -> int | None:
        return self.length - self.batch - 1 if self.known else None

    @property
    def end_of_dataloader(self) -> bool:
        return self.batch == self.length - 1


def run_epoch(steps: int, length: int, *, known: bool, context: bool) -> list[tuple[list[int], float]]:
    """Per applied step: the divisors of its micro-batches, and the correction."""
    epoch = FakeEpoch(length, known)
    window = AccumulationWindow(steps, lambda: epoch)
    applied: list[tuple[list[int], float]] = []
    divisors: list[int] = []
    for epoch.batch in range(length):
        if context:
            window.enter_batch()
        assert window.next_backward_ends == ((epoch.batch + 1) % steps == 0 or epoch.batch == length - 1)
        window.count_backward()
        divisors.append(window.divisor)
        if window.count_step():
            applied.append((divisors, window.correction))
            divisors = []
        assert not window.dropping_is_meant
        if context:
            window.leave_batch()
    assert not divisors
    return applied


@pytest.mark.parametrize("context", [True, False])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("steps", "length"), [(1, 3), (2, 4), (4, 10), (3, 2), (5, 1)])
def test_gradients_are_averaged_over_the_true_window(steps: int, length: int, known: bool, context: bool) -> None:
    """Divisor over correction is the number of micro-batches of each window, the shorter last one included."""
    applied = run_epoch(steps, length, known=known, context=context)
    assert sum(len(divisors) for divisors, _ in applied) == length
    assert len(applied) == -(-length // steps)
    for divisors, correction in applied:
        assert {d / correction for d in divisors} == {float(len(divisors))}
        assert known is False or correction == 1.0


def test_without_a_loader_windows_are_of_the_given_size() -> None:
    """A loop over anything else than a prepared loader accumulates `steps` micro-batches."""
    window = AccumulationWindow(3)
    acts = []
    for _ in range(7):
        window.count_backward()
        acts.append(window.count_step())
    assert acts == [False, False, True, False, False, True, False]


def test_several_backwards_and_one_step_without_accumulation() -> None:
    """With gradient_accumulation_steps 1, a hand-written loop may add up as many backwards as it likes."""
    window = AccumulationWindow(1)
    for _ in range(3):
        window.count_backward()
    assert window.divisor == 1
    assert window.count_step()


def test_step_at_every_window_by_hand() -> None:
    """`if (i + 1) % n == 0: step()` is understood as well as a step after each micro-batch."""
    window = AccumulationWindow(4)
    for _ in range(3):
        for _ in range(4):
            window.count_backward()
        assert window.count_step()


def test_a_step_at_another_cadence_is_an_error() -> None:
    """Stepping every two backwards with gradient_accumulation_steps 4 cannot be what was meant."""
    window = AccumulationWindow(4)
    window.count_backward()
    window.count_backward()
    with pytest.raises(LoopError, match="after 2 backwards, but gradient_accumulation_steps is 4"):
        window.count_step()


def test_more_backwards_than_the_window_is_an_error() -> None:
    """Eight backwards without a step, with gradient_accumulation_steps 4, would silently lose the division."""
    window = AccumulationWindow(4)
    for _ in range(4):
        window.count_backward()
    with pytest.raises(LoopError, match="ran 5 times without"):
        window.count_backward()


def test_no_step_at_the_end_of_an_epoch() -> None:
    """`if (i + 1) % 4 == 0: step()` over 10 batches: the next epoch's first backward says what to write."""
    epoch = FakeEpoch(10)
    window = AccumulationWindow(4, lambda: epoch)
    for epoch.batch in range(10):
        window.count_backward()
        if (epoch.batch + 1) % 4 == 0:
            assert window.count_step()
    epoch.batch = 0
    with pytest.raises(LoopError, match=r"last accumulation window has 2(.|\n)* or i \+ 1 == len\(loader\)"):
        window.count_backward()


def test_an_early_step_at_the_end_of_a_loader_that_was_not_prepared() -> None:
    """After whole windows, without a running loader, the advice is to prepare it."""
    window = AccumulationWindow(4)
    for _ in range(4):
        window.count_backward()
    assert window.count_step()
    window.count_backward()
    window.count_backward()
    with pytest.raises(LoopError, match=r"windows before had 4(.|\n)*prepare\(\) the loader"):
        window.count_step()


def test_a_window_goes_on_over_a_break(capfd: pytest.CaptureFixture[str]) -> None:
    """An epoch that is left inside a window: its gradients count in the next one, and that is said once."""
    epoch = FakeEpoch(10)
    window = AccumulationWindow(4, lambda: epoch)
    acts = []
    for _ in range(3):
        for epoch.batch in range(6):
            with window:
                window.count_backward()
                acts.append(window.count_step())
    assert [index for index, act in enumerate(acts) if act] == [3, 7, 11, 15]
    assert capfd.readouterr().err.count("an epoch was left after 2 of the 4 micro-batches") == 1


def test_entering_accumulate_twice_is_an_error() -> None:
    """A nested accumulate() would count one micro-batch as two."""
    window = AccumulationWindow(2)
    window.enter_batch()
    with pytest.raises(LoopError, match="inside accumulate"):
        window.enter_batch()


def test_step_after_the_context_acts_on_its_boundary() -> None:
    """optimizer.step() may stand after the `with accumulate` block."""
    window = AccumulationWindow(2)
    acts = []
    for _ in range(4):
        window.enter_batch()
        window.count_backward()
        window.leave_batch()
        acts.append(window.count_step())
    assert acts == [False, True, False, True]


def test_two_optimizers_step_at_one_boundary() -> None:
    """A second optimizer's step in the same batch acts as the first one's did."""
    window = AccumulationWindow(2)
    window.enter_batch()
    window.count_backward()
    assert not window.count_step()
    assert not window.count_step()
    window.leave_batch()
    window.enter_batch()
    window.count_backward()
    window.count_backward()
    assert window.count_step()
    assert window.ends_here
    assert window.count_step()


def test_zero_grad_drops_only_between_backward_and_step() -> None:
    """First in the loop or after a step it means nothing; between backward and step it drops."""
    window = AccumulationWindow(1)
    assert not window.dropping_is_meant
    window.count_backward()
    assert window.dropping_is_meant
    window.restart()
    assert not window.dropping_is_meant
    window.count_backward()
    window.count_step()
    assert not window.dropping_is_meant


def test_zero_grad_never_drops_inside_accumulate() -> None:
    """Inside accumulate() gradients of earlier micro-batches are kept."""
    window = AccumulationWindow(2)
    window.enter_batch()
    window.count_backward()
    assert not window.dropping_is_meant
    window.leave_batch()
    assert not window.dropping_is_meant
