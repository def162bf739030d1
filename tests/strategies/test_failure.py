"""Backwards that fail or reach a part of the model: the state afterwards, and the errors."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
import torch.distributed as dist
from on_paths import ALL, on_paths, without
from paths import assert_near, global_batch, loss_of, own_batch, raised, running, take_steps, weights
from torch import Tensor, nn

from zero_plugin.errors import LoopError


class _Fails(torch.autograd.Function):
    """The identity, whose backward runs out of memory while `armed`."""

    armed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        if _Fails.armed:
            raise torch.OutOfMemoryError("out of memory")
        return gradient


class Fragile(nn.Module):
    """A model whose last layer already has its gradients when the backward fails."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.middle, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(_Fails.apply(self.middle(torch.tanh(self.first(x)))))  # type: ignore[no-untyped-call]


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _fail(accelerator: Any, model: Any, step: int) -> None:
    _Fails.armed = True
    try:
        raised(
            torch.OutOfMemoryError, "out of memory", by=lambda: accelerator.backward(loss_of(model, own_batch(step)))
        )
    finally:
        _Fails.armed = False


def _plain(windows: list[list[int]]) -> dict[str, Tensor]:
    model = Fragile()
    sgd = _sgd(model)
    for window in windows:
        for step in window:
            (loss_of(model, global_batch(step)) / len(window)).backward()
        sgd.step()
        sgd.zero_grad()
    return model.state_dict()


@on_paths(*ALL, daily=("ddp", "zero1", "zero2"))
def test_a_failed_backward_is_dropped(path: str) -> None:
    """After out of memory, `zero_grad()` and another batch, training continues as though no backward had failed."""
    for precision in ("no", "bf16"):
        with running(path, mixed_precision=precision) as accelerator:
            model = Fragile()
            model, optimizer = accelerator.prepare(model, _sgd(model))
            for step in range(4):
                if step != 2:
                    _fail(accelerator, model, 9)
                    optimizer.zero_grad()
                accelerator.backward(loss_of(model, own_batch(step)))
                norm = float(accelerator.clip_grad_norm_(model.parameters(), float("inf")))
                assert norm > 0
                optimizer.step()
                optimizer.zero_grad()
            tolerance = 1e-5 if precision == "no" else 1e-2
            assert_near(weights(accelerator, model), _plain([[0], [1], [2], [3]]), tolerance)


@on_paths(*ALL, daily=("ddp", "zero0", "zero2"))
def test_a_failed_backward_of_large_layers(path: str) -> None:
    """Unfinished sums of the failed backward do not reach the next gradients."""

    def build() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(*(nn.Linear(600, 600) for _ in range(8)))

    def loss(model: Any, step: int, world: int = 1, rank: int = 0) -> Tensor:
        torch.manual_seed(step)
        return model(torch.randn(8, 600).chunk(world)[rank]).square().mean()

    def fail(_: Tensor) -> None:
        raise ArithmeticError

    plain = build()
    loss(plain, 1).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    world, rank = dist.get_world_size(), dist.get_rank()
    with running(path) as accelerator:
        net = build()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        outputs: Any = net[2].register_full_backward_hook(lambda *_: fail(torch.empty(0)))
        raised(ArithmeticError, by=lambda: accelerator.backward(loss(model, 0, world, rank)))
        outputs.remove()
        optimizer.zero_grad()
        accelerator.backward(loss(model, 1, world, rank))
        optimizer.step()
        assert_near(weights(accelerator, model), plain.state_dict())


@on_paths(*ALL, daily=("ddp", "zero2-cpu"))
def test_a_failed_backward_ends_its_window(path: str) -> None:
    """In a window of several micro-batches `zero_grad()` drops the whole window, and a new one begins."""
    for by_hand in (True, False):
        with running(path, gradient_accumulation_steps=2) as accelerator:
            model = Fragile()
            model, optimizer = accelerator.prepare(model, _sgd(model))

            def train(step: int, model: Any = model, optimizer: Any = optimizer, by_hand: bool = by_hand) -> None:
                if by_hand:
                    accelerator.backward(loss_of(model, own_batch(step)))
                    optimizer.step()
                    return
                with accelerator.accumulate(model):
                    take_steps(accelerator, model, optimizer, [step])

            train(0)
            train(1)
            train(7)
            if by_hand:
                _fail(accelerator, model, 8)
                optimizer.zero_grad()
                train(2)
            else:
                with accelerator.accumulate(model):
                    _fail(accelerator, model, 8)
                    optimizer.zero_grad()
                    take_steps(accelerator, model, optimizer, [2])
            train(3)
            assert optimizer.applied_steps == 2
            assert_near(weights(accelerator, model), _plain([[0, 1], [2, 3]]), 1e-5)


@on_paths(*ALL, daily=("ddp", "zero1", "zero2"))
def test_a_failed_backward_is_not_applied(path: str) -> None:
    """Without `zero_grad()` some of its gradients remain. Both a step and another backward are refused."""
    with running(path) as accelerator:
        model = Fragile()
        model, optimizer = accelerator.prepare(model, _sgd(model))
        before = weights(accelerator, model)
        _fail(accelerator, model, 9)
        loss = loss_of(model, own_batch(0))
        raised(LoopError, "failed", "optimizer.zero_grad()", by=lambda: accelerator.backward(loss))
        raised(LoopError, "failed", "optimizer.zero_grad()", by=optimizer.step)
        raised(
            LoopError, "failed", "optimizer.zero_grad()", by=lambda: accelerator.clip_grad_norm_(model.parameters(), 1)
        )
        optimizer.zero_grad()
        optimizer.step()
        assert_near(weights(accelerator, model), before, 1e-9)


class _Kept(torch.autograd.Function):
    """The identity, whose node in the graph has its own attribute."""

    kept: weakref.ref[nn.Module]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.attribute = nn.Identity()
        _Kept.kept = weakref.ref(ctx.attribute)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


@on_paths(*ALL, daily=("ddp", "zero1", "zero2"))
def test_a_failed_backward_keeps_nothing(path: str) -> None:
    """Its graph is freed with the loss. The graph of a direct backward is freed when its gradients are dropped."""
    for by_script in (False, True):
        with running(path) as accelerator:
            model = Fragile()
            model, optimizer = accelerator.prepare(model, _sgd(model))

            def fail(accelerator: Any = accelerator, model: Any = model, by_script: bool = by_script) -> None:
                x, _ = own_batch(0)
                first = _Kept.apply(model(x)).square().mean()  # type: ignore[no-untyped-call]
                loss = first + model(x).square().mean()  # its part is differentiated first
                if by_script:
                    loss.backward()
                else:
                    accelerator.backward(loss)

            _Fails.armed = not by_script
            try:
                raised(LoopError if by_script else torch.OutOfMemoryError, by=fail)
            finally:
                _Fails.armed = False
            if by_script:
                optimizer.zero_grad()
            gc.collect()
            assert _Kept.kept() is None


class Branches(nn.Module):
    """A model whose right layer may be unused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.left, self.right = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.left(x) + (self.right(x) if both else 0)


@on_paths("ddp")
def test_a_parameter_that_sits_out(path: str) -> None:
    """DDP then never finishes reducing. The backward names the parameter and the fix, and no gradient is applied."""
    with running(path, gradient_accumulation_steps=2) as accelerator:
        net = Branches()
        model, optimizer = accelerator.prepare(net, _sgd(net))

        def backward(step: int, both: bool) -> None:
            x, y = own_batch(step)
            accelerator.backward((model(x, both) - y).square().mean())

        for step in range(2):  # in a window's first micro-batch nothing is reduced, so any parameter may be unused
            backward(step, step == 1)
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.applied_steps == 1
        before = weights(accelerator, model)
        backward(2, False)
        words = ("right.weight", "right.bias", "find_unused_parameters=True", "kwargs_handlers")
        raised(LoopError, *words, by=lambda: backward(3, False))
        raised(LoopError, "failed", by=optimizer.step)
        assert_near(weights(accelerator, model), before, 1e-9)
        optimizer.zero_grad()
        for step in range(4, 6):
            backward(step, True)
            optimizer.step()
        assert optimizer.applied_steps == 2


@on_paths(*without(ALL, "ddp"), daily=("single", "zero0", "zero2", "zero2-cpu", "zero1-cpu"))
def test_dropped_gradients_of_what_sits_out(path: str) -> None:
    """A layer that only the dropped backward used does not change, also if the norm was measured before."""
    for steps in (1, 2):
        with running(path, gradient_accumulation_steps=steps) as accelerator:
            net = Branches()
            model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            for window in range(2):
                before = weights(accelerator, model)
                x, y = own_batch(window)
                accelerator.backward((model(x, True) - y).square().mean())
                accelerator.clip_grad_norm_(model.parameters(), float("inf"))
                optimizer.zero_grad()
                for _ in range(steps):
                    accelerator.backward((model(x, False) - y).square().mean())
                    optimizer.step()
                assert optimizer.applied_steps == window + 1
                moved = {name for name, after in weights(accelerator, model).items() if not after.equal(before[name])}
                assert moved == {"left.weight", "left.bias"}, moved
