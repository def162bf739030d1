"""The backwards that are checked, and the mistakes found in them."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zero_plugin.config.resolve.facts import Facts
from zero_plugin.errors import LoopError
from zero_plugin.loop.first_steps import FirstSteps
from zero_plugin.loop.optimizer import AcceleratedOptimizer
from zero_plugin.loop.training import Training
from zero_plugin.loop.window import Window
from zero_plugin.strategies.events import subscribe
from zero_plugin.strategies.torch_session import TorchSession
from zero_plugin.strategies.torch_strategies import GUARDS


class Loop:
    """Trainings of two layers each, where the first may be frozen, checked as `Accelerator` does."""

    def __init__(self, *, models: int = 1, frozen: bool = False, processes: int = 2, precision: str = "no") -> None:
        self.models = [nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)) for _ in range(models)]
        self.trainings = []
        for model in self.models:
            model[0].requires_grad_(not frozen)
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            session = TorchSession(model, model, sgd, precision="no")
            subscribe(session, GUARDS, "all")
            trained = tuple(p for p in model.parameters() if p.requires_grad)
            optimizer, window = AcceleratedOptimizer(sgd), Window(1)
            optimizer.run_in(window, session)
            resolved: Any = SimpleNamespace(precision=precision)
            self.trainings.append(Training(session, Facts(), resolved, window, trained, sgd, optimizer))
        self.current: Any = None
        self.first_steps = FirstSteps(self.trainings, self, processes)
        self.first_steps.begin()

    def backward(self, which: int = 0, *further: nn.Module) -> bool:
        """Return whether this backward was checked."""
        x = torch.ones(1, 1)
        for module in (self.models[which], *further):
            x = module(x)
        due = self.first_steps.is_due()
        if due:
            self.first_steps.check(x.sum())
        for index, training in enumerate(self.trainings):
            training.reached = index == which
        return due


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "zero_plugin")


def test_the_first_backwards_and_one_in_a_hundred() -> None:
    """They are checked whether or not an optimizer steps, so one that waits for its turn costs nothing."""
    loop = Loop()
    assert [number for number in range(1, 315) if loop.backward()] == [*range(1, 11), 110, 210, 310]


def test_every_epoch_is_looked_at() -> None:
    """A module that joins in a later epoch is found in its first backward."""
    loop = Loop()
    for _ in range(20):
        loop.backward()
    loop.current = SimpleNamespace(position=7, end_of_dataloader=False)
    assert not loop.backward()
    loop.current.position = 0
    with pytest.raises(LoopError, match="no prepared model"):
        loop.backward(0, nn.Linear(1, 1))


def test_one_process_has_nothing_to_average() -> None:
    """There the script may train an unprepared module, unless its gradients have the model's loss scale."""
    assert Loop(processes=1).backward(0, nn.Linear(1, 1))
    with pytest.raises(LoopError, match="would be multiplied by the loss scale"):
        Loop(processes=1, precision="fp16").backward(0, nn.Linear(1, 1))


def test_a_model_that_is_trained_later() -> None:
    """The first model's losses are not checked because the second never steps. Later the second one's are."""
    loop = Loop(models=2)
    assert sum(loop.backward(0) for _ in range(50)) == 10
    assert [loop.backward(1) for _ in range(15)] == [False, *[True] * 10, *[False] * 4]


def test_a_parameter_is_unfrozen() -> None:
    """The first loss that reaches it is refused, at any step. Before that, no error is raised."""
    loop = Loop(frozen=True)
    for _ in range(20):
        loop.backward()
    loop.models[0][0].requires_grad_(True)
    with pytest.raises(LoopError, match=r"were frozen in prepare\(\), or were added later"):
        loop.backward()
    loop.models[0][0].requires_grad_(False)
    assert not loop.backward()


def test_frozen_parameters_are_looked_at_once_in_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are checked once the gradients are complete: the window's last backward finds them."""
    from zero_plugin import Accelerator
    from zero_plugin.loop import first_steps

    looks = []
    monkeypatch.setattr(first_steps, "_is_trainable", lambda p: looks.append(p) or p.requires_grad)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    net = nn.Sequential(nn.Linear(1, 1).requires_grad_(False), nn.Linear(1, 1))
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net[1].parameters(), lr=0.1))

    def window(unfreezes_at: int | None = None) -> None:
        for micro in range(4):
            with accelerator.accumulate(model):
                if micro == unfreezes_at:
                    net[0].requires_grad_(True)
                accelerator.backward(model(torch.ones(1, 1)).sum())
                optimizer.step()
                optimizer.zero_grad()

    for _ in range(5):
        window()
    looks.clear()
    for _ in range(10):
        window()
    assert len(looks) == 10 * 2  # weight and bias
    before = net[1].weight.clone()
    with pytest.raises(LoopError, match="were frozen in prepare"):
        window(unfreezes_at=1)
    assert torch.equal(net[1].weight, before)
    accelerator.end_training()


def test_a_layer_is_replaced() -> None:
    """resize_token_embeddings after prepare() is an example: the layer is not part of the prepared model."""
    loop = Loop()
    loop.models[0][1] = nn.Linear(1, 1)
    with pytest.raises(LoopError, match=r"of the Sequential that were frozen in prepare\(\), or were added later"):
        loop.backward()


def test_a_loop_that_never_steps_has_no_prepared_loader(caplog: pytest.LogCaptureFixture) -> None:
    """The warning comes once, in its hundredth backward or at the end. Several backwards of one step cause none."""
    loop = Loop()
    for _ in range(300):
        loop.backward()
    loop.first_steps.warn_if_never_stepped()
    assert len(caplog.messages) == 1
    assert "optimizer.step() was never called" in caplog.messages[0]
    caplog.clear()
    short = Loop()
    short.backward()
    short.first_steps.warn_if_never_stepped()
    assert not caplog.messages
    short.backward()
    short.first_steps.warn_if_never_stepped()
    assert len(caplog.messages) == 1


def test_a_loop_that_steps_is_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The step may be inside a window."""
    loop = Loop()
    for _ in range(3):
        loop.backward()
    loop.trainings[0].window.resize(2)
    assert loop.trainings[0].optimizer is not None
    loop.trainings[0].window.count_backward()
    loop.trainings[0].optimizer.step()
    loop.first_steps.warn_if_never_stepped()
    assert not caplog.messages


def test_a_loop_that_goes_back_to_a_checkpoint_without_a_step_is_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """It has stepped, although the checkpoint counts no steps."""
    loop = Loop()
    optimizer = loop.trainings[0].optimizer
    assert optimizer is not None
    for _ in range(3):
        loop.backward()
        optimizer.step()
    optimizer.restore_counts(0, 0)
    loop.backward()
    loop.first_steps.warn_if_never_stepped()
    assert not caplog.messages


def test_several_losses_of_the_first_batch(caplog: pytest.LogCaptureFixture) -> None:
    """Two backwards before the first step, as in a GAN's critic, cause no warning. An epoch of them does."""
    loop = Loop()
    loop.current = SimpleNamespace(position=0, end_of_dataloader=False)
    for _ in range(3):
        loop.backward()
    assert not caplog.messages
    loop.current.position = 1
    loop.backward()
    assert not caplog.messages
    loop.current.position = 0
    loop.backward()
    assert "optimizer.step() was never called" in caplog.messages[0]


@pytest.mark.parametrize("change", ["layer", "parameter", "inside"])
def test_what_is_put_into_a_model_is_looked_at_at_once(change: str) -> None:
    """After any number of backwards, each one fails until the module is removed again."""
    loop = Loop()
    for _ in range(15):
        loop.backward()
    model: Any = loop.models[0]
    before = model[1]
    if change == "layer":
        model[1] = nn.Linear(1, 1)
    elif change == "parameter":
        before.bias = nn.Parameter(torch.zeros(1))
    else:
        model.append(nn.Sequential(nn.Identity(), nn.Linear(1, 1)))
    for _ in range(2):
        with pytest.raises(LoopError, match="added later"):
            loop.backward()


def test_what_trains_nothing_is_not_looked_at() -> None:
    """A layer without parameters, a frozen one, an earlier one, and changes of other modules are ignored."""
    loop = Loop()
    for _ in range(15):
        loop.backward()
    model: Any = loop.models[0]
    model.append(nn.Identity())
    model[0] = model[0]
    model.extra = nn.Linear(1, 1).requires_grad_(False)
    nn.Sequential().append(nn.Linear(1, 1))
    assert not loop.backward()


def test_it_is_not_kept() -> None:
    """The permanent hook on modules references nothing of an ended training."""
    loop = Loop()
    alive = weakref.ref(loop.first_steps)
    del loop
    gc.collect()
    assert alive() is None
