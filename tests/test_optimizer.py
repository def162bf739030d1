"""A prepared optimizer is a torch optimizer for all code, and steps at windows' ends."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from one_weight import Loop
from torch.optim.lr_scheduler import LambdaLR

from zero_plugin.errors import LoopError
from zero_plugin.loop.backward import run_through_one
from zero_plugin.loop.clip import clip
from zero_plugin.loop.optimizer import AcceleratedOptimizer
from zero_plugin.loop.step import drop_if_meant
from zero_plugin.loop.window import Window
from zero_plugin.strategies.optimizer_only import UnpreparedOptimizer
from zero_plugin.strategies.torch_session import TorchSession


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
        assert before - loop.value == pytest.approx(0.5 * (1 + 0.5))  # the momentum was copied too


def test_an_optimizers_own_zero_grad_drops_the_gradients() -> None:
    """A class or an object with its own zero_grad is called, if its method is not torch's."""

    class Clearing(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            cleared.append("class")
            super().zero_grad(set_to_none)

    cleared: list[str] = []
    layer = torch.nn.Linear(1, 1)
    for optimizer in (Clearing(layer.parameters()), torch.optim.SGD(layer.parameters())):
        if not isinstance(optimizer, Clearing):
            optimizer.zero_grad = lambda set_to_none=True: cleared.append("object")  # type: ignore[method-assign]
        session = TorchSession(layer, layer, optimizer, precision="no")
        window = Window(1)
        run_through_one(window, session, layer(torch.ones(1)).sum())
        drop_if_meant(window, session)
        session.close()
    assert cleared == ["class", "object"]


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
    """The dropped backward leaves no trace, and a new window starts."""
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
    assert float(clip(loop.window, loop.session, 1e-3)) == 100.0
    loop.optimizer.zero_grad()
    loop.backward(1.0)
    loop.optimizer.step()
    assert loop.value == 0.5


@pytest.mark.parametrize("copied", [lambda o: pickle.loads(pickle.dumps(o)), copy.deepcopy])
def test_a_copy_stands_by_itself(copied: Callable[[AcceleratedOptimizer], AcceleratedOptimizer]) -> None:
    """It has copies of parameters and states, and steps as torch's own."""
    loop = Loop()
    loop.backward()
    loop.optimizer.step()
    twin = copied(loop.optimizer)
    assert twin.waits
    (weight,) = twin.param_groups[0]["params"]
    assert weight is not loop.weight.weight
    weight.grad = torch.ones(1, 1)
    twin.step()
    twin.zero_grad()
    assert weight.grad is None
    assert float(weight.detach()) == 0.5 - 0.5 * (1 + 0.5)  # with the momentum of the first step
    assert loop.value == 0.5


def test_by_itself() -> None:
    """Without a model it is a torch optimizer: it clips, steps and drops. Another scaler than ours is refused."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), device_placement=False)
    model(torch.tensor([4.0])).sum().backward()
    assert float(clip(optimizer.window, optimizer.session, 1.0)) == 4.0
    optimizer.step()
    assert float(model.weight.detach()) == pytest.approx(0.5)
    assert (optimizer.applied_steps, optimizer.step_was_skipped, optimizer.loss_scale) == (1, False, 1.0)
    with pytest.raises(LoopError, match="scaler"):
        AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), scaler=object())  # type: ignore[arg-type]


def test_what_may_not_step() -> None:
    """An optimizer of an unprepared model raises an error instead of training the model as it is."""
    optimizer = Loop().optimizer
    optimizer.run_in(Window(1), UnpreparedOptimizer(Loop().sgd, steps=False))
    with pytest.raises(LoopError, match="the model of this SGD was not prepared"):
        optimizer.step()


def test_its_parts_may_be_set() -> None:
    """Groups, states and defaults are written through, and groups added."""
    loop = Loop()
    groups, state = loop.sgd.param_groups, loop.sgd.state
    more = torch.nn.Parameter(torch.zeros(1))
    loop.session.left_out = [more]  # of its model, and in no optimizer so far
    loop.optimizer.add_param_group({"params": [more], "lr": 2.0})
    assert [group["lr"] for group in loop.sgd.param_groups] == [0.5, 2.0]
    loop.optimizer.param_groups, loop.optimizer.state, loop.optimizer.defaults = groups[:1], state, {"lr": 3.0}
    assert (loop.sgd.param_groups, loop.sgd.defaults) == (groups[:1], {"lr": 3.0})


def test_schedule_free_optimizers_change_weights() -> None:
    """`train` and `eval` reach the optimizer that has them, also below a wrapper, and are harmless on others."""

    class Free(torch.optim.SGD):
        mode = ""

        def train(self) -> None:
            self.mode = "train"

        def eval(self) -> None:
            self.mode = "eval"

    free = Free([torch.zeros(1)], lr=0.1)
    optimizer = AcceleratedOptimizer(AcceleratedOptimizer(free))
    optimizer.train()
    assert free.mode == "train"
    optimizer.eval()
    assert free.mode == "eval"
    Loop().optimizer.train()
    Loop().optimizer.eval()


def test_after_the_end() -> None:
    """Once the session is closed, its error says so."""
    loop = Loop()
    loop.session.close()
    with pytest.raises(LoopError, match="has ended"):
        loop.optimizer.step()
    with pytest.raises(LoopError, match="has ended"):
        _ = loop.optimizer.param_groups


def test_torchs_schedules_take_it_for_an_optimizer() -> None:
    """LambdaLR on the prepared optimizer drives the running one, without a warning about the order of calls."""
    loop = Loop(lr=1.0)
    schedule = LambdaLR(loop.optimizer, lambda step: 0.5**step)
    for expected in (1.0, 0.5, 0.25):
        assert loop.sgd.param_groups[0]["lr"] == expected
        loop.backward()
        loop.optimizer.step()
        schedule.step()
