"""Parameters outside an optimizer, losses that miss a model, and calls past the prepared objects."""

from __future__ import annotations

import math
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

import torch
import torch.distributed as dist
from on_paths import ALL, on_paths
from paths import (
    assert_near,
    global_batch,
    is_zero,
    loss_of,
    make_net,
    own_batch,
    raised,
    running,
    same,
    take_steps,
    weights,
)
from torch import Tensor, nn

from zero_plugin.errors import LoopError


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@on_paths(*ALL, daily=("single", "zero3", "zero3-cpu"))
def test_an_optimizer_of_the_head(path: str) -> None:
    """It trains as in plain torch. Its norm covers its parameters, given alone or with all.

    No other gradients pile up.
    """
    plain = make_net()
    sgd = _sgd(plain[2].parameters())
    norms = []
    for step in range(3):
        plain.zero_grad()
        loss_of(plain, global_batch(step)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(plain[2].parameters(), 0.05)))
        sgd.step()
    with running(path) as accelerator, redirect_stderr(StringIO()) as said:
        net = make_net()
        model, optimizer = accelerator.prepare(net, _sgd(net[2].parameters()))
        for step in range(3):
            accelerator.backward(loss_of(model, own_batch(step)))
            given = net[2].parameters() if step % 2 else model.parameters()
            norm = float(accelerator.clip_grad_norm_(given, 0.05))
            assert math.isclose(norm, norms[step], rel_tol=1e-4), (norm, norms[step])
            optimizer.step()
            optimizer.zero_grad()
            assert net[0].weight.grad is None
        assert_near(weights(accelerator, model), plain.state_dict(), 1e-5)
    told = "2 of the 4 trainable parameters of the Sequential are in no optimizer"
    assert said.getvalue().count(told) == accelerator.is_main_process


@on_paths(*ALL, daily=("single", "zero0", "zero3"))
def test_a_group_joins_later(path: str) -> None:
    """Layers thawed one after another train from then on. Frozen ones, and any under ZeRO, are refused."""
    plain = make_net()
    sgd = _sgd(plain[2].parameters())
    for step in range(4):
        plain.zero_grad()
        if step == 2:
            sgd.add_param_group({"params": list(plain[0].parameters()), "lr": 0.05})
        loss_of(plain, global_batch(step)).backward()
        sgd.step()
    with running(path) as accelerator:
        net = make_net()
        model, optimizer = accelerator.prepare(net, _sgd(net[2].parameters()))
        for step in range(4):
            if step == 2:
                group = {"params": list(net[0].parameters()), "lr": 0.05}
                if is_zero(path):
                    raised(LoopError, "before prepare()", by=lambda group=group: optimizer.add_param_group(group))
                    return
                optimizer.add_param_group(group)
                raised(LoopError, "frozen", by=lambda group=group: optimizer.add_param_group(group))
            take_steps(accelerator, model, optimizer, [step])
        assert_near(weights(accelerator, model), plain.state_dict(), 1e-5)
        frozen = make_net()
        frozen[0].requires_grad_(False)
        _, other = accelerator.prepare(frozen, _sgd(frozen[2].parameters()))
        frozen[0].requires_grad_(True)
        raised(LoopError, "frozen", by=lambda: other.add_param_group({"params": frozen[0].weight}))


class Halving:
    """A schedule as other libraries write it: no LRScheduler, on the optimizer that the script built."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] /= 2


def halving(optimizer: torch.optim.Optimizer) -> Any:
    """Build torch's schedule with the same rates."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


@on_paths(*ALL, daily=("single", "zero0", "zero3"))
def test_schedules_that_were_not_prepared(path: str) -> None:
    """Another library's or torch's schedule drives the running optimizer, whether passed to `prepare` or not."""
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad):
        for own in (Halving, halving):
            with running(path) as accelerator:
                net = make_net()
                given = kind(net.parameters(), lr=0.1)
                schedule: Any = own(given)
                if own is Halving:
                    model, optimizer, schedule = accelerator.prepare(net, given, schedule)
                else:
                    model, optimizer = accelerator.prepare(net, given)
                for step in range(2):
                    accelerator.backward(loss_of(model, own_batch(step)))
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                assert [group["lr"] for group in optimizer.param_groups] == [0.025]


@on_paths(*ALL, daily=("single", "zero3", "zero3-cpu"))
def test_a_loss_of_something_else(path: str) -> None:
    """A loss of a plain tensor, like SAC's temperature, leaves the model alone, and the tensor gets its gradient."""
    with running(path) as accelerator:
        model = make_net()
        model, optimizer = accelerator.prepare(model, _sgd(model.parameters()))
        temperature = torch.ones(1, requires_grad=True)
        for step in range(3):
            take_steps(accelerator, model, optimizer, [step])
            before = weights(accelerator, model)
            accelerator.backward((3 * temperature).sum())
            assert temperature.grad is not None
            assert float(temperature.grad) == 3.0
            temperature.grad = None
            optimizer.step()
            optimizer.zero_grad()
            assert same(weights(accelerator, model), before)
        module = accelerator.unwrap_model(model)
        if not path.startswith("zero3"):  # a loss of the weights themselves passes through no output
            accelerator.backward(sum(p.square().sum() for p in module.parameters()))  # type: ignore[arg-type]
            optimizer.step()
            assert not same(weights(accelerator, model), before)


@on_paths(*ALL, daily=("single", "zero3", "zero3-cpu"))
def test_a_tensor_that_is_trained_beside_a_model(path: str) -> None:
    """SAC's temperature with its own optimizer is refused only if the processes have trained it to different values."""
    world = dist.get_world_size()

    def train(how: str, accelerator: Any = None) -> tuple[Any, float]:
        model = make_net()
        optimizer = _sgd(model.parameters())
        if accelerator is not None:
            model, optimizer = accelerator.prepare(model, optimizer)
        temperature = torch.ones(1, requires_grad=True)
        own = torch.optim.SGD([temperature], lr=0.3)
        for step in range(5):
            x, y = (global_batch if accelerator is None else own_batch)(step)
            if how == "attacks":  # a tensor that each step creates and trains
                temperature = torch.ones(1, requires_grad=True)
                own = torch.optim.SGD([temperature], lr=0.3)
            out = model(x)
            losses = [(out.float() * (1.0 if how == "apart" else temperature) - y).square().mean()]
            if how == "apart":
                losses.append((temperature * out.detach().float() - y).square().mean())
            for loss in losses:
                if accelerator is None:
                    loss.backward()
                else:
                    accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if how == "averages" and accelerator is not None:
                temperature.grad = accelerator.reduce(temperature.grad, "mean")
            own.step()
            own.zero_grad()
        return model, float(temperature)

    for how in ("together", "apart", "averages", "attacks"):
        with running(path) as accelerator:
            if world > 1 and how in ("together", "apart"):
                words = ("tensor 1 of shape (1,): ", "on rank 0", "on rank 1", "nn.Parameter", "accelerator.reduce(")
                raised(LoopError, *words, by=lambda how=how, accelerator=accelerator: train(how, accelerator))
                continue
            plain, value = train(how)
            model, trained = train(how, accelerator)
            if how != "attacks" or world == 1:
                assert abs(trained - value) < 1e-5
            assert_near(weights(accelerator, model), plain.state_dict())


@on_paths("single", "ddp")
def test_a_scaled_loss_of_something_else(path: str) -> None:
    """Under fp16 its gradient would carry the model's loss scale."""
    with running(path, mixed_precision="fp16") as accelerator:
        model = make_net()
        model, _ = accelerator.prepare(model, _sgd(model.parameters()))
        temperature = torch.ones(1, requires_grad=True)
        raised(LoopError, "loss scale", "loss.backward()", by=lambda: accelerator.backward((3 * temperature).sum()))


@on_paths(*ALL, daily=("single", "zero1", "zero3"))
def test_the_given_optimizer_does_not_step(path: str) -> None:
    """It would apply scaled, incomplete or missing gradients. After the training it steps again."""
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        with running(path) as accelerator:
            net = make_net()
            given = kind(net.parameters(), lr=0.1)
            model, optimizer = accelerator.prepare(net, given)
            before = weights(accelerator, model)
            accelerator.backward(loss_of(model, own_batch(0)))
            raised(LoopError, kind.__name__, "optimizer that prepare() returned", by=given.step)
            assert same(weights(accelerator, model), before)
            optimizer.step()
            assert not same(weights(accelerator, model), before)
    if not is_zero(path):
        given.step()


@on_paths(*ALL, daily=("single", "zero3", "zero1-cpu"))
def test_a_direct_backward_inside_a_window(path: str) -> None:
    """`loss.backward()` between two micro-batches is detected, as before the first."""
    with running(path, gradient_accumulation_steps=2) as accelerator:
        model = make_net()
        model, _ = accelerator.prepare(model, _sgd(model.parameters()))
        accelerator.backward(loss_of(model, own_batch(0)))
        raised(LoopError, "accelerator.backward(loss)", by=lambda: loss_of(model, own_batch(1)).backward())


@on_paths(*ALL, daily=("single", "zero0", "zero3"))
def test_zero_grad_of_the_model(path: str) -> None:
    """`model.zero_grad()` acts like the optimizer's: nothing inside a window, a drop after a backward."""
    plain = make_net()
    sgd = _sgd(plain.parameters())
    for window in ((0, 1), (3, 4)):
        for step in window:
            (loss_of(plain, global_batch(step)) / 2).backward()
        sgd.step()
        sgd.zero_grad()
    with running(path, gradient_accumulation_steps=2) as accelerator:
        model = make_net()
        model, optimizer = accelerator.prepare(model, _sgd(model.parameters()))
        for step in (0, 1):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, own_batch(step)))
                optimizer.step()
                model.zero_grad()
        accelerator.backward(loss_of(model, own_batch(2)))
        model.zero_grad(set_to_none=True)
        for step in (3, 4):
            accelerator.backward(loss_of(model, own_batch(step)))
            optimizer.step()
        assert optimizer.applied_steps == 2
        assert_near(weights(accelerator, model), plain.state_dict(), 1e-5)


@on_paths(*ALL, daily=("single", "zero0", "zero3"))
def test_weights_of_a_process(path: str) -> None:
    """After all of these steps the processes hold the same weights."""
    with running(path) as accelerator:
        net = make_net()
        model, optimizer = accelerator.prepare(net, _sgd(net[2].parameters()))
        for step in range(2):
            accelerator.backward(loss_of(model, own_batch(step)))
            optimizer.step()
            model.zero_grad()
        state: list[Tensor] = [t for _, t in accelerator._prepared.trainings[0].session.named_tensors()]
        for tensor in state:
            mine = tensor.clone()
            dist.broadcast(mine, 0)
            assert torch.equal(mine, tensor)
