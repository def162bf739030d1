"""A prepared schedule follows the steps of its optimizer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from one_weight import Loop
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, LambdaLR, OneCycleLR, ReduceLROnPlateau

from zero_plugin.loop.scheduler import AcceleratedScheduler


def run(scheduler: Any, loop: Loop, times: int, steps: int) -> list[float]:
    """Return the rates applied at each step of a loop under a prepared scheduler."""
    prepared = AcceleratedScheduler(scheduler, loop.optimizer, times=times)
    rates = []
    for _ in range(steps):
        rates.extend(prepared.get_last_lr())
        loop.backward()
        loop.optimizer.step()
        prepared.step()
    return rates


@pytest.mark.parametrize("times", [1, 3])
def test_a_schedule_advances_with_applied_steps(times: int) -> None:
    """It advances `times` per applied step. A call inside a window, or after a skipped step, does not count."""
    loop = Loop(steps=2, lr=1.0)
    rates = run(LambdaLR(loop.sgd, lambda step: 1 / (1 + step)), loop, times, steps=4)
    assert rates == pytest.approx([1, 1, 1 / (1 + times), 1 / (1 + times)])


def test_a_skipped_step_does_not_advance() -> None:
    """After an overflow the schedule stays."""
    loop = Loop()
    schedule = LambdaLR(loop.sgd, lambda step: 1.0)
    prepared = AcceleratedScheduler(schedule, loop.optimizer, times=1)
    for gradient, expected in ((float("nan"), 0), (1.0, 1), (float("inf"), 1)):
        loop.backward(gradient)
        loop.optimizer.step()
        prepared.step()
        assert schedule.last_epoch == expected


def test_one_call_per_epoch() -> None:
    """An epoch counts if any of its steps was applied, even if the last one was skipped or inside a window."""
    loop = Loop(steps=2, lr=1.0)
    prepared = AcceleratedScheduler(LambdaLR(loop.sgd, lambda step: 0.5**step), loop.optimizer, times=1)
    nan = float("nan")
    epochs = (([1.0, 1.0, nan, 1.0], 0.5), ([1.0] * 3, 0.25), ([nan] * 3, 0.25), ([1.0] * 2, 0.125))
    for gradients, rate in epochs:
        for gradient in gradients:
            loop.backward(gradient)
            loop.optimizer.step()
        prepared.step()
        assert prepared.get_last_lr() == [rate]


@pytest.mark.parametrize("times", [2, 3, 4])
def test_one_cycle_ends_at_its_end(times: int) -> None:
    """Several advances per step neither raise nor pass the last value, where torch's rate would rise again."""
    loop = Loop()
    schedule = OneCycleLR(loop.sgd, max_lr=1.0, total_steps=10)
    rates = run(schedule, loop, times, steps=8)
    assert rates[-1] == min(rates)
    assert schedule.last_epoch == 9


def test_a_plateau_counts_measurements() -> None:
    """For any number of processes, one call is one measurement, and the metric is passed on."""
    loop = Loop(lr=1.0)
    prepared = AcceleratedScheduler(ReduceLROnPlateau(loop.sgd, factor=0.1, patience=1), loop.optimizer, times=4)
    rates = []
    for _ in range(4):
        loop.backward()
        loop.optimizer.step()
        prepared.step(1.0)
        rates.extend(prepared.get_last_lr())
    assert rates == pytest.approx([1.0, 1.0, 0.1, 0.1])
    state = prepared.state_dict()
    prepared.load_state_dict({**state, "num_bad_epochs": 7})
    assert prepared.num_bad_epochs == 7


def test_a_plateau_loses_no_measurement() -> None:
    """Measurements inside a window, and after a skipped step, count too."""
    loop = Loop(steps=3, lr=1.0)
    prepared = AcceleratedScheduler(ReduceLROnPlateau(loop.sgd, factor=0.1, patience=1), loop.optimizer)
    for gradient in (1.0, float("nan"), 1.0):
        loop.backward(gradient)
        loop.optimizer.step()
        prepared.step(1.0)
    assert prepared.get_last_lr() == [0.1]


def test_a_chain_goes_on() -> None:
    """A ChainedScheduler has no `last_epoch`. Its state is saved and loaded, and its rates are shown."""
    loop = Loop(lr=1.0)
    parts = [LambdaLR(loop.sgd, lambda step: 0.5**step), ConstantLR(loop.sgd, factor=0.1, total_iters=9)]
    prepared = AcceleratedScheduler(ChainedScheduler(parts), loop.optimizer)
    assert str(prepared.describe(None, None, 3)).startswith("ChainedScheduler: learning rate 0.1 start")
    state = copy.deepcopy(prepared.state_dict())
    loop.backward()
    loop.optimizer.step()
    prepared.step()
    assert prepared.get_last_lr() == [0.5]
    prepared.load_state_dict(state)
    assert [part.last_epoch for part in parts] == [0, 0]


def test_it_may_move_by_itself() -> None:
    """Without a link to the optimizer every call counts once, also inside a window."""
    loop = Loop(steps=2, lr=1.0)
    schedule = LambdaLR(loop.sgd, lambda step: 0.5**step)
    prepared = AcceleratedScheduler(schedule, loop.optimizer, step_with_optimizer=False, times=4)
    for expected in (0.5, 0.25):
        loop.backward()
        loop.optimizer.step()
        prepared.step()
        assert prepared.get_last_lr() == [expected]


def test_by_itself() -> None:
    """Built by a script on several optimizers, it waits for all of them, and moves before any has stepped."""
    one, two = Loop(steps=2), Loop()
    schedule = LambdaLR(one.sgd, lambda step: 1.0)
    prepared = AcceleratedScheduler(schedule, [one.optimizer, two.optimizer], split_batches=True)
    with pytest.warns(UserWarning, match="before `optimizer.step"):  # torch's own advice
        prepared.step()
    assert prepared.last_epoch == 1
    for loop in (one, two):
        loop.backward()
        loop.optimizer.step()
    prepared.step()
    assert prepared.last_epoch == 1
    one.backward()
    one.optimizer.step()
    prepared.step()
    assert prepared.last_epoch == 2
    assert one.optimizer.schedulers == two.optimizer.schedulers == [prepared]
