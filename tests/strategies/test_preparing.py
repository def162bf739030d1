"""Preparing in several calls and releasing: any order gives the same training, or an error that names the mistake."""

from __future__ import annotations

import copy
import gc
import weakref
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from typing import Any

import torch
from on_paths import LOOP, on_paths
from paths import (
    assert_near,
    global_batch,
    is_zero,
    loss_of,
    make_net,
    net_and_sgd,
    own_batch,
    raised,
    running,
    weights,
)
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from zero_plugin import Accelerator
from zero_plugin.errors import LoopError
from zero_plugin.loop.optimizer import AcceleratedOptimizer

STEPS = 3


def _unprepared() -> tuple[nn.Module, torch.optim.Optimizer, LRScheduler]:
    model, sgd = net_and_sgd(momentum=0.9)
    return model, sgd, LambdaLR(sgd, lambda step: 0.5**step)


def _plain() -> dict[str, Tensor]:
    model, sgd, schedule = _unprepared()
    for i in range(STEPS):
        loss_of(model, global_batch(i)).backward()
        sgd.step()
        schedule.step()
        sgd.zero_grad()
    return model.state_dict()


def _train(accelerator: Accelerator, model: Any, optimizer: Any, schedule: Any) -> None:
    for i in range(STEPS):
        accelerator.backward(loss_of(model, own_batch(i)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert (optimizer.applied_steps, schedule.last_epoch) == (STEPS, STEPS)
    assert_near(weights(accelerator, model), _plain())


@on_paths(*LOOP, daily=("single", "zero0", "zero3"))
def test_the_model_comes_last(path: str) -> None:
    """Optimizer and schedule wait for it, in either order.

    The schedule may use the optimizer that `prepare` returned.
    """
    for order in ("optimizer first", "schedule first", "on the prepared"):
        with running(path) as accelerator:
            model, sgd, schedule = _unprepared()
            if order == "optimizer first":
                optimizer = accelerator.prepare_optimizer(sgd)
                schedule = accelerator.prepare_scheduler(schedule)
            elif order == "schedule first":
                schedule = accelerator.prepare(schedule)
                optimizer = accelerator.prepare(sgd)
            else:
                optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
                schedule = accelerator.prepare(LambdaLR(optimizer, lambda step: 0.5**step))
            assert optimizer.waits
            assert accelerator.prepare(optimizer) is optimizer
            model = accelerator.prepare_model(model)
            assert not optimizer.waits
            _train(accelerator, model, optimizer, schedule)


@on_paths(*LOOP, daily=("single", "zero0", "zero3"))
def test_the_model_comes_first(path: str) -> None:
    """Its optimizer joins in a later call. Under ZeRO both must be prepared in one call, and the message says so."""
    with running(path) as accelerator, redirect_stderr(StringIO()) as said:
        model, sgd, schedule = _unprepared()
        model = accelerator.prepare(model)
        if is_zero(path):
            raised(LoopError, "later call", "one call", by=lambda: accelerator.prepare(sgd))
            return
        optimizer, schedule = accelerator.prepare(sgd, schedule)
        _train(accelerator, model, optimizer, schedule)
        other = torch.optim.SGD(model.parameters(), lr=0.1)
        raised(LoopError, "a second optimizer", by=lambda: accelerator.prepare(other))
        model, sgd, schedule = _unprepared()
        model, optimizer = accelerator.prepare(model), AcceleratedOptimizer(sgd)  # made by the script
        assert accelerator.prepare(optimizer) is optimizer
        assert not optimizer.waits
    assert said.getvalue().count("DDP allocates memory for its gradients") == 2 * (
        path == "ddp" and accelerator.is_main_process
    )


@on_paths("single", "ddp")
def test_what_cannot_join(path: str) -> None:
    """Frozen weights, or weights that DDP would train in 16 bits, cannot join later."""
    with running(path) as accelerator:
        model = make_net()
        first = model[0].requires_grad_(False)
        prepared = accelerator.prepare(model)
        first.requires_grad_(True)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        raised(LoopError, "frozen in the model's call", by=lambda: accelerator.prepare(sgd))
        half = make_net().to(torch.bfloat16)
        accelerator.prepare(half)
        sgd = torch.optim.SGD(half.parameters(), lr=0.1)
        if path == "ddp":
            raised(LoopError, "16 bits", by=lambda: accelerator.prepare(sgd))
        else:
            accelerator.prepare(sgd)
            assert half[0].weight.dtype is torch.float32
        judge = make_net()
        assert accelerator.prepare_model(judge, evaluation_mode=True) is judge
        assert accelerator.verify_device_map(prepared) is False
        judge.hf_device_map = {"a": 0, "b": 1}  # type: ignore[assignment]
        assert accelerator.verify_device_map(judge) is True


@on_paths(*LOOP, daily=("single", "zero3", "zero2-cpu"))
def test_an_optimizer_without_its_model(path: str) -> None:
    """On one device it trains an unchanged model.

    On other paths the training would differ silently, so it is refused.
    """
    with running(path, gradient_accumulation_steps=2) as accelerator:
        model, sgd, _ = _unprepared()
        optimizer = accelerator.prepare(sgd)
        if path != "single":
            raised(LoopError, "no trained model", by=lambda: accelerator.backward(loss_of(model, own_batch(0))))
            raised(LoopError, "was not prepared", by=optimizer.step)
            return
        plain, plain_sgd, _ = _unprepared()
        for i in range(4):
            (loss_of(plain, global_batch(i)) / 2).backward()
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, own_batch(i)))
                accelerator.clip_grad_norm_(model.parameters(), 1e6)
                accelerator.clip_grad_value_(model.parameters(), 1e6)
                optimizer.step()
                optimizer.zero_grad()
            if i % 2:
                plain_sgd.step()
                plain_sgd.zero_grad()
        assert optimizer.applied_steps == 2
        assert_near(model.state_dict(), plain.state_dict())


@on_paths(*LOOP, daily=("single", "zero1", "zero3"))
def test_a_schedule_of_another_optimizer(path: str) -> None:
    """Together with a model it is an error. Alone it waits, and the first backward reports the missing optimizer."""
    with running(path) as accelerator, redirect_stderr(StringIO()) as said:
        model, _, schedule = _unprepared()
        other = torch.optim.SGD(model.parameters(), lr=0.1)
        raised(LoopError, "was not prepared", by=lambda: accelerator.prepare(model, other, schedule))
        accelerator.free_memory()
        model, _, schedule = _unprepared()
        accelerator.prepare(schedule)
        model, _ = accelerator.prepare(*net_and_sgd())
        for i in range(2):
            accelerator.backward(loss_of(model, own_batch(i)))
    assert said.getvalue().count("the SGD and its scheduler were prepared, but") == accelerator.is_main_process


@on_paths(*LOOP, daily=("single", "zero1", "zero3"))
def test_memory_is_freed(path: str) -> None:
    """After `free_memory` nothing is prepared, nothing keeps the model, and the next one trains as the first."""
    with running(path) as accelerator:
        for call in (accelerator.free_memory, accelerator.clear):
            model, optimizer, schedule = accelerator.prepare(*_unprepared())
            loader = accelerator.prepare(torch.utils.data.DataLoader(torch.zeros(4, 8)))
            assert accelerator._models == [model]
            assert accelerator._optimizers == [optimizer]
            assert accelerator._schedulers == [schedule]
            assert all(getattr(o, "_is_accelerate_prepared", False) for o in (model, optimizer, schedule))
            _train(accelerator, model, optimizer, schedule)
            assert copy.deepcopy({"of": accelerator})["of"] is accelerator
            kept = optimizer
            module = weakref.ref(accelerator.unwrap_model(model))
            model, optimizer, schedule, loader = call(model, optimizer, schedule, loader)
            assert (model, optimizer, schedule, loader) == (None, None, None, None)
            assert accelerator._models == accelerator._optimizers == accelerator._schedulers == []
            assert accelerator._dataloaders == []
            raised(LoopError, "has ended", by=kept.step)
            raised(LoopError, "has ended", by=partial(accelerator.prepare, kept))
            del kept
            gc.collect()
            assert module() is None


@on_paths("single", "ddp")
def test_gradients_of_a_model_alone(path: str) -> None:
    """A model prepared without an optimizer has unpartitioned, averaged gradients, which `no_sync` leaves unaveraged.

    An unprepared model's loss then runs too and stays on its process.
    """
    with running(path) as accelerator, redirect_stderr(StringIO()) as said:
        plain = make_net()
        model = accelerator.prepare(copy.deepcopy(plain))
        for i in range(3):
            accelerator.backward(loss_of(plain, global_batch(i)))
            if i % 2:
                accelerator.backward(loss_of(model, own_batch(i)))
            else:
                with accelerator.no_sync(model):
                    accelerator.backward(loss_of(model, own_batch(i)))
            assert _gradients_agree(plain, model) is (path == "single" or bool(i % 2))
        plain.zero_grad()
        model.zero_grad()
        losses = []
        with accelerator.no_sync(model):
            losses = [loss_of(model, own_batch(i)) for i in range(2)]
        for i, loss in enumerate(losses):
            accelerator.backward(loss_of(plain, global_batch(i)))
            if i == 0:
                accelerator.backward(loss)
            else:
                with accelerator.trigger_sync_in_backward(model):
                    accelerator.backward(loss)
            assert _gradients_agree(plain, model) is (path == "single" or i == 1)
    assert said.getvalue().count("backward() is torch's own") == accelerator.is_main_process


def _gradients_agree(plain: nn.Module, model: nn.Module) -> bool:
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    return all(torch.allclose(p.grad, q.grad, atol=1e-6) for p, q in pairs if p.grad is not None and q.grad is not None)


@on_paths(*LOOP, daily=("single", "zero3", "zero2-cpu"))
def test_modules_without_parameters(path: str) -> None:
    """A loss module is prepared like any module: alone, with buffers, or together with the model."""
    weight = torch.tensor([2.0])
    for beside in (False, True):
        with running(path) as accelerator:
            model, sgd, schedule = _unprepared()
            squares, logits = nn.MSELoss(), nn.BCEWithLogitsLoss(pos_weight=weight)
            if beside:
                squares, model, logits, sgd, schedule = accelerator.prepare(squares, model, logits, sgd, schedule)
            else:
                squares, logits = accelerator.prepare(squares), accelerator.prepare(logits)
                model, sgd, schedule = accelerator.prepare(model, sgd, schedule)
            one = torch.ones(1, device=accelerator.device)
            assert squares(one, one * 3).item() == 4.0
            assert logits(one * 0, one).item() == nn.functional.softplus(one * 0).item() * 2
            _train(accelerator, model, sgd, schedule)


@on_paths("zero1")
def test_a_model_built_for_stage_3_is_refused_below(path: str) -> None:
    """Its parameters are partitions. Below stage 3 DeepSpeed would take them for the complete parameters."""
    with running("zero3") as accelerator, accelerator.init_model():
        net = make_net()
    with running(path) as accelerator:
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        raised(LoopError, "partitioned", "zero_stage: 3", by=lambda: accelerator.prepare(net, sgd))
