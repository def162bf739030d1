"""A prepared optimizer is a torch optimizer for whoever asks; a prepared scheduler follows its steps."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

from zero_plugin.accumulation import AccumulationWindow
from zero_plugin.errors import LoopError
from zero_plugin.prepared import PreparedOptimizer, PreparedScheduler
from zero_plugin.strategies.torch_session import TorchSession


class Loop:
    """One weight of 1.0 on one device, with the window and the session that the facade would give it."""

    def __init__(self, steps: int = 1, lr: float = 0.5) -> None:
        self.weight = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(self.weight.weight)
        self.sgd = torch.optim.SGD(self.weight.parameters(), lr=lr, momentum=0.5)
        self.window = AccumulationWindow(steps)
        self.session = TorchSession(self.weight, self.weight, self.sgd, precision="no", clipping=None)
        self.optimizer = PreparedOptimizer(self.session, self.window)

    def backward(self, gradient: float = 1.0) -> None:
        self.window.count_backward()
        self.session.backward(self.weight(torch.tensor([gradient])).sum() / self.window.divisor)

    @property
    def value(self) -> float:
        return float(self.weight.weight.detach())


def test_it_is_the_optimizer_that_runs() -> None:
    """Groups, state and defaults are the running optimizer's own objects, and its other attributes are found."""
    loop = Loop()
    assert isinstance(loop.optimizer, torch.optim.Optimizer)
    assert loop.optimizer.param_groups is loop.sgd.param_groups
    assert loop.optimizer.state is loop.sgd.state
    assert loop.optimizer.defaults is loop.sgd.defaults
    assert loop.optimizer.add_param_group.__name__ == "add_param_group"
    loop.sgd.own_attribute = 3  # type: ignore[attr-defined]
    assert loop.optimizer.own_attribute == 3
    with pytest.raises(AttributeError):
        _ = loop.optimizer.missing


def test_its_state_goes_out_and_in() -> None:
    """`state_dict` and `load_state_dict` are the running optimizer's."""
    first, second = Loop(), Loop()
    first.backward()
    first.optimizer.step()
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    for loop in (first, second):
        before = loop.value
        loop.backward()
        loop.optimizer.step()
        assert before - loop.value == pytest.approx(0.5 * (1 + 0.5))  # the momentum came along


def test_steps_act_where_windows_end() -> None:
    """Two micro-batches per step: the first `step` does nothing, the second applies their mean."""
    loop = Loop(steps=2)
    calls: list[float] = []
    loop.optimizer.call_after_step(lambda: calls.append(loop.value))
    loop.backward(1.0)
    loop.optimizer.step()
    assert (loop.value, loop.optimizer.acted, loop.optimizer.applied_steps, calls) == (1.0, False, 0, [])
    loop.backward(3.0)
    loop.optimizer.step()
    assert (loop.value, loop.optimizer.acted, loop.optimizer.applied_steps, calls) == (0.0, True, 1, [0.0])


def test_zero_grad_between_backward_and_step_drops() -> None:
    """The dropped backward leaves no trace, and the window starts anew."""
    loop = Loop()
    loop.backward(100.0)
    loop.optimizer.zero_grad()
    loop.backward(1.0)
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    assert loop.value == 0.5


def test_a_clipped_window_that_was_dropped_is_forgotten() -> None:
    """The next window is neither clipped nor corrected by the one that was dropped."""
    loop = Loop()
    loop.backward(100.0)
    assert float(loop.optimizer.clip(1e-3, norm_type=2.0, only=None)) == 100.0
    loop.optimizer.zero_grad()
    loop.backward(1.0)
    loop.optimizer.step()
    assert loop.value == 0.5


def test_it_is_not_pickled() -> None:
    """A checkpoint holds states, not live sessions."""
    with pytest.raises(LoopError, match="save_state"):
        pickle.dumps(Loop().optimizer)


def test_after_the_end() -> None:
    """Once the session is closed, it says so."""
    loop = Loop()
    loop.session.close()
    with pytest.raises(LoopError, match="has ended"):
        loop.optimizer.step()
    with pytest.raises(LoopError, match="has ended"):
        _ = loop.optimizer.param_groups


def test_torchs_schedules_take_it_for_an_optimizer() -> None:
    """LambdaLR on the prepared optimizer drives the running one, and does not warn of an order of calls."""
    loop = Loop(lr=1.0)
    schedule = LambdaLR(loop.optimizer, lambda step: 0.5**step)
    for expected in (1.0, 0.5, 0.25):
        assert loop.sgd.param_groups[0]["lr"] == expected
        loop.backward()
        loop.optimizer.step()
        schedule.step()


def run(scheduler: Any, loop: Loop, times: int, steps: int) -> list[float]:
    """Rates applied at each step of a loop under a prepared scheduler."""
    prepared = PreparedScheduler(scheduler, loop.optimizer, times=times)
    rates = []
    for _ in range(steps):
        rates.extend(prepared.get_last_lr())
        loop.backward()
        loop.optimizer.step()
        prepared.step()
    return rates


@pytest.mark.parametrize("times", [1, 3])
def test_a_schedule_advances_with_applied_steps(times: int) -> None:
    """`times` per applied step; a call inside a window, or after a skipped step, does not count."""
    loop = Loop(steps=2, lr=1.0)
    rates = run(LambdaLR(loop.sgd, lambda step: 1 / (1 + step)), loop, times, steps=4)
    assert rates == pytest.approx([1, 1, 1 / (1 + times), 1 / (1 + times)])


def test_a_skipped_step_does_not_advance() -> None:
    """After an overflow the schedule stays."""
    loop = Loop()
    schedule = LambdaLR(loop.sgd, lambda step: 1.0)
    prepared = PreparedScheduler(schedule, loop.optimizer, times=1)
    for skipped, expected in ((True, 0), (False, 1)):
        loop.backward()
        loop.optimizer.step()
        loop.optimizer.step_was_skipped = skipped
        prepared.step()
        assert schedule.last_epoch == expected


@pytest.mark.parametrize("times", [2, 3, 4])
def test_one_cycle_ends_at_its_end(times: int) -> None:
    """Several advances per step neither raise nor pass the last value, where torch's rate would rise again."""
    loop = Loop()
    schedule = OneCycleLR(loop.sgd, max_lr=1.0, total_steps=10)
    rates = run(schedule, loop, times, steps=8)
    assert rates[-1] == min(rates)
    assert schedule.last_epoch == 9


def test_a_plateau_counts_measurements() -> None:
    """However many processes: one call is one measurement, and the metric is passed on."""
    loop = Loop(lr=1.0)
    prepared = PreparedScheduler(ReduceLROnPlateau(loop.sgd, factor=0.1, patience=1), loop.optimizer, times=4)
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
