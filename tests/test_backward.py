"""A backward finds the models that its loss reaches and counts for these. Tensors of no model are detected."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zero_plugin.config.resolve.facts import Facts
from zero_plugin.data.active import ActiveLoaders, LoaderProgress
from zero_plugin.errors import LoopError
from zero_plugin.loop.backward import run_backward
from zero_plugin.loop.optimizer import AcceleratedOptimizer
from zero_plugin.loop.together import TogetherWindows
from zero_plugin.loop.training import Training
from zero_plugin.loop.window import Window
from zero_plugin.strategies.events import subscribe
from zero_plugin.strategies.torch_session import TorchSession
from zero_plugin.strategies.torch_strategies import GUARDS
from zero_plugin.tensors.wrappers import find_leaves


def make_trainings(count: int, steps: int = 1) -> list[Training]:
    """Build trainings of one weight of 1.0 each, in plain torch."""
    trainings = []
    for _ in range(count):
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        sgd = torch.optim.SGD(model.parameters(), lr=0.5)
        session = TorchSession(model, model, sgd, precision="no")
        subscribe(session, GUARDS, "all")
        window = Window(steps)
        resolved: Any = SimpleNamespace(precision="no")
        optimizer = AcceleratedOptimizer(sgd)
        optimizer.run_in(window, session)
        parameters = tuple(model.parameters())
        trainings.append(Training(session, Facts(), resolved, window, parameters, sgd, optimizer))
    if count > 1:
        for training in trainings:
            training.watch_gradients()
    return trainings


def losses(trainings: list[Training], *which: int) -> torch.Tensor:
    x = torch.ones(1, 1)
    for i in which:
        x = trainings[i].session.model(x)
    return x.sum()


def test_it_finds_whom_a_loss_reaches() -> None:
    """It finds one model, two, or only the second, since the first is frozen for this loss."""
    trainings = make_trainings(3)
    assert run_backward(trainings, [], losses(trainings, 1)) == [trainings[1]]
    assert run_backward(trainings, [], losses(trainings, 0, 2)) == [trainings[0], trainings[2]]
    trainings[0].session.module.requires_grad_(False)
    assert run_backward(trainings, [], losses(trainings, 0, 2)) == [trainings[2]]
    assert [t.window.dropping_is_meant for t in trainings] == [True, True, True]


def test_a_loss_of_nobody() -> None:
    """A backward that trains no prepared model is a mistake."""
    trainings = make_trainings(2)
    with pytest.raises(LoopError, match="depends on no parameter"):
        run_backward(trainings, [], nn.Linear(1, 1)(torch.ones(1, 1)).sum())


def test_gradients_come_divided_by_the_window() -> None:
    """With accumulation each loss counts for one of `steps`, in each model that it reaches."""
    trainings = make_trainings(2, steps=4)
    windows = TogetherWindows([training.window for training in trainings])
    for _ in range(4):
        with windows:
            run_backward(trainings, [], losses(trainings, 0, 1))
    for training in trainings:
        assert training.window.ends_here
        assert training.optimizer is not None
        training.optimizer.step()
        assert float(training.parameters[0].detach()) == 0.5


def test_by_hand_a_window_has_one_owner() -> None:
    """With accumulation and without accumulate(), a loss of two models cannot be counted."""
    trainings = make_trainings(2, steps=2)
    assert run_backward(trainings, [], losses(trainings, 0)) == [trainings[0]]
    with pytest.raises(LoopError, match="reaches Linear and Linear, and gradient_accumulation_steps is 2"):
        run_backward(trainings, [], losses(trainings, 0, 1))


def test_a_failed_backward_leaves_no_trace() -> None:
    """Its error is raised, and the next backward runs."""
    trainings = make_trainings(2)
    with pytest.raises(RuntimeError, match="does not require grad"):
        run_backward(trainings, [], torch.ones(()))
    assert run_backward(trainings, [], losses(trainings, 0)) == [trainings[0]]


def test_another_models_loss_is_no_micro_batch() -> None:
    """Inside accumulate() of one model, gradients left in another do not count there, and its zero_grad drops them."""
    trainings = make_trainings(2, steps=2)
    one, two = (training.window for training in trainings)
    for _ in range(2):
        with one:
            run_backward(trainings, [], losses(trainings, 0))
    assert trainings[0].optimizer is not None
    trainings[0].optimizer.step()
    with two:
        run_backward(trainings, [], losses(trainings, 0, 1))
    assert trainings[0].parameters[0].grad is not None
    with one:
        trainings[0].optimizer.zero_grad()
        assert trainings[0].parameters[0].grad is None
        run_backward(trainings, [], losses(trainings, 0))
        trainings[0].optimizer.zero_grad()  # has no effect inside a window
        assert trainings[0].parameters[0].grad is not None
        assert not one.ends_here
    with one:
        assert one.ends_here


@dataclass
class Epoch:
    """An epoch of `length` batches without a known length."""

    length: int
    position: int = -1
    batches_left: None = None

    @property
    def end_of_dataloader(self) -> bool:
        return self.position == self.length - 1


def in_epoch(length: int, steps: tuple[int, int]) -> tuple[list[Training], Epoch]:
    """Start two trainings in an epoch, each with its own accumulation."""
    trainings, epoch, running = make_trainings(2), Epoch(length), ActiveLoaders()
    for training, count in zip(trainings, steps, strict=True):
        training.window = Window(count, LoaderProgress(running=running))
        training._watching.clear()
        training.watch_gradients()
        assert training.optimizer is not None
        training.optimizer.run_in(training.window, training.session)
    running.enter(epoch)
    return trainings, epoch


def test_a_step_used_what_turned_out_to_be_a_shorter_window() -> None:
    """Its gradients were divided by a number that the ended data did not reach, which is an error."""
    (one, two), epoch = in_epoch(2, (3, 1))
    for epoch.position in range(2):
        with one.window:
            run_backward([one, two], [], losses([one, two], 0, 1))
        if epoch.position == 0:
            with two.window:
                run_backward([one, two], [], losses([one, two], 1))
            two.optimizer.step()
    with pytest.raises(LoopError, match=r"has 2 micro-batches, but .* as though it had 3"):
        one.optimizer.step()


def test_windows_that_end_together_have_one_correction() -> None:
    """Gradients of another open window are corrected like the step's own if that window ends alike."""
    (one, two), epoch = in_epoch(2, (3, 3))
    for epoch.position in range(2):
        with two.window:
            run_backward([one, two], [], losses([one, two], 1))
            two.optimizer.step()
        gradient = two.parameters[0].grad
        if epoch.position == 1:
            assert gradient is not None
            assert float(gradient) == pytest.approx(3 / 2)  # its own two and the other's first, each over 2
        with one.window:
            run_backward([one, two], [], losses([one, two], 0, 1))
            one.optimizer.step()
    assert one.parameters[0].grad is not None
    assert [t.optimizer.applied_steps for t in (one, two)] == [1, 1]


@pytest.mark.parametrize("first", [0, 1])
def test_a_model_with_gradients_of_anothers_window_alone_has_its_correction(first: int) -> None:
    """A model that accumulate() does not name steps with the named one, whichever of the two steps first."""
    trainings, epoch = in_epoch(2, (3, 3))
    for epoch.position in range(2):
        with trainings[0].window:
            run_backward(trainings, [], losses(trainings, 0, 1))
            for training in (trainings[first], trainings[1 - first]):
                assert training.optimizer is not None
                training.optimizer.step()
    assert [float(t.parameters[0].grad) for t in trainings] == pytest.approx([1.0, 1.0])


def test_the_accumulation_changes_beside_another_model() -> None:
    """An open window keeps its size, and its gradients the mean over it."""
    one, two = trainings = make_trainings(2, steps=2)
    run_backward(trainings, [], losses(trainings, 0))
    for training in trainings:
        training.window.resize(4)
    run_backward(trainings, [], losses(trainings, 0))
    assert one.optimizer is not None
    one.optimizer.step()
    assert one.parameters[0].grad is not None
    assert float(one.parameters[0].grad) == 1.0
    assert two.parameters[0].grad is None


def test_the_leaves_of_a_loss() -> None:
    """They are found behind other models and branches, each once. Frozen leaves are not included."""
    known, stranger, frozen = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)
    latent = torch.zeros(1, 2, requires_grad=True)
    found = find_leaves((known(latent) + stranger(frozen(known(latent)))).sum())
    wanted = [latent, *(p for model in (known, stranger) for p in model.parameters())]
    assert sorted(map(id, found)) == sorted(map(id, wanted))
