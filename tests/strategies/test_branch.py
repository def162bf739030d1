"""Processes that take different branches of a model, as with conditional computation or layers dropped at random."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from on_paths import SEVERAL, on_paths, without
from paths import assert_near, global_batch, own_batch, raised, running, same, weights
from torch import Tensor, nn

from zero_plugin import Accelerator, DistributedDataParallelKwargs, dummy_forward
from zero_plugin.errors import LoopError
from zero_plugin.strategies.deepspeed.guards.same_order import SameOrder

_MICRO_BATCHES = 2

# The branches that a process takes in a micro-batch, by its rank.
_WAYS: dict[str, Callable[[int, int], str]] = {
    "always its own": lambda rank, _: "ab"[rank],
    "in turn": lambda rank, micro: "ab"[(rank + micro) % 2],
    "in another order": lambda rank, _: ("ab", "ba")[rank],
    "one more": lambda rank, _: ("a", "ab")[rank],
    "of another size": lambda rank, _: "ac"[rank],
}
_DIFFERENT = list(_WAYS)
_WAYS["at one"] = lambda *_: "ab"


class Branching(nn.Module):
    """Two branches of equal size and one of another size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8))
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor, branches: str) -> Tensor:
        for branch in branches:
            x = torch.tanh(getattr(self, branch)(x))
        return self.out(x)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _train_plainly(ways: list[str]) -> dict[str, Tensor]:
    """Train on one device with the batches and branches of both processes. Unreached parameters get zero gradients."""
    model = Branching()
    sgd = _sgd(model)
    for step, way in enumerate(ways):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        for micro in range(_MICRO_BATCHES):
            inputs, targets = global_batch(_MICRO_BATCHES * step + micro)
            for rank, (x, y) in enumerate(zip(inputs.chunk(2), targets.chunk(2), strict=True)):
                ((model(x, _WAYS[way](rank, micro)) - y).square().mean() / 2 / _MICRO_BATCHES).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        sgd.step()
    return model.state_dict()


def _train(accelerator: Accelerator, model: Any, optimizer: Any, ways: list[str]) -> None:
    for step, way in enumerate(ways):
        for micro in range(_MICRO_BATCHES):
            with accelerator.accumulate(model):
                x, y = own_batch(_MICRO_BATCHES * step + micro)
                loss = (model(x, _WAYS[way](dist.get_rank(), micro)).float() - y).square().mean()
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()


def _prepared(accelerator: Accelerator) -> tuple[Any, Any]:
    net = Branching()
    return accelerator.prepare(net, _sgd(net))


@on_paths("zero0", "zero1", "zero1-cpu", daily="zero0")
def test_each_process_counts(path: str) -> None:
    """A parameter that a process does not reach counts as 0 there. Values and clipping equal those of one device."""
    for precision, tolerance in (("no", 1e-6), ("bf16", 1e-2)):
        with running(path, gradient_accumulation_steps=_MICRO_BATCHES, mixed_precision=precision) as accelerator:
            model, optimizer = _prepared(accelerator)
            _train(accelerator, model, optimizer, _DIFFERENT)
            assert_near(weights(accelerator, model), _train_plainly(_DIFFERENT), tolerance)


@on_paths("zero2", "zero3", "zero2-cpu", "zero3-cpu", "zero3-gathered", daily=("zero2", "zero3-cpu"))
def test_different_branches_are_refused(path: str) -> None:
    """If sums start during backward, every process raises an error before applying a mixture, and names the difference.

    The first windows check before the reduction, so unequal sizes are found. Later windows check before the step.
    """
    words = ("different branches", "rank 0", "rank 1", "stage 1")
    for careful in (True, False):
        with running(path, gradient_accumulation_steps=_MICRO_BATCHES) as accelerator:
            model, optimizer = _prepared(accelerator)
            before = weights(accelerator, model)
            ways = [way for way in _DIFFERENT if careful or way not in ("one more", "of another size")]
            if not careful:
                _same_order(optimizer)._careful = 0
            for way in ways:
                raised(LoopError, *words, by=lambda: _train(accelerator, model, optimizer, [way]))  # noqa: B023
                assert same(weights(accelerator, model), before)
                if path.startswith("zero3"):  # the error does not release what a forward gathered
                    break
                optimizer.zero_grad()
            else:
                _train(accelerator, model, optimizer, ["at one"] * 2)
                assert_near(weights(accelerator, model), _train_plainly(["at one"] * 2), 1e-6)


def _same_order(optimizer: Any) -> SameOrder:
    guards = [call.__self__ for call in optimizer.session.events.before_reduce]
    return next(guard for guard in guards if isinstance(guard, SameOrder))


class Sometimes(nn.Module):
    """A branch for batches that have an image; its activations are infinite for dummy inputs of 0."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.vision = nn.Sequential(nn.Linear(8, 12), Reciprocal(), nn.Linear(12, 8)).requires_grad_(not frozen)
        self.text, self.out = nn.Linear(8, 8), nn.Linear(8, 4)
        nn.init.zeros_(self.vision[0].bias)

    def forward(self, x: Tensor, *, has_image: bool) -> Tensor:
        hidden = self.text(x)
        if has_image:
            hidden = hidden + torch.tanh(self.vision(x))
        elif dist.get_world_size() > 1 and not self.is_plain:
            hidden = hidden + dummy_forward(self.vision, torch.zeros(1, 8))
        return self.out(torch.tanh(hidden))

    is_plain = False


class Reciprocal(nn.Module):
    """Infinite at 0, with infinite derivatives."""

    def forward(self, x: Tensor) -> Tensor:
        return 1 / x.abs().sqrt()


def _has_image(step: int, rank: int) -> bool:
    """Return whether a process has an image: both processes, one of them, or none."""
    return (True, rank == 0, rank == 1, False)[step % 4]


@on_paths(*without(SEVERAL, "zero1-cpu"), daily=("ddp", "zero2", "zero3-cpu"))
def test_a_branch_that_only_some_processes_take_trains(path: str) -> None:
    """With `dummy_forward` on the other processes, the branch trains, frozen or not.

    Infinite values there change nothing.
    """
    for frozen in (False, True):
        plain = Sometimes(frozen=frozen)
        plain.is_plain = True
        sgd = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
        with running(path) as accelerator:
            net = Sometimes(frozen=frozen)
            trained = [p for p in net.parameters() if p.requires_grad]
            model, optimizer = accelerator.prepare(net, torch.optim.SGD(trained, lr=0.1))
            for step in range(14):  # more than the first ones, which are compared before each collective
                inputs, targets = (part.chunk(2) for part in global_batch(step))
                for rank in range(2):
                    out = plain(inputs[rank], has_image=_has_image(step, rank))
                    ((out - targets[rank]).square().mean() / 2).backward()
                sgd.step()
                sgd.zero_grad()
                x, y = own_batch(step)
                accelerator.backward((model(x, has_image=_has_image(step, dist.get_rank())) - y).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            assert_near(weights(accelerator, model), plain.state_dict(), 1e-5)


@on_paths("zero1", "zero2", "zero3", daily=("zero1", "zero2"))
def test_frozen_branches_are_named(path: str) -> None:
    """At stage 3 an error names a frozen tower that only some processes run. Below stage 3 the model trains."""
    with running(path) as accelerator:
        net = Branching()
        net.a.requires_grad_(False)
        trained = [p for p in net.parameters() if p.requires_grad]
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(trained, lr=0.1))
        x, y = own_batch(0)

        def train() -> None:
            accelerator.backward((model(x, ("a", "")[dist.get_rank()]) - y).square().mean())
            optimizer.step()

        if path == "zero3":
            raised(LoopError, "rank 0 gathers the weights of a.bias, a.weight", "dummy_forward", by=train)
        else:
            train()


def _train_unevenly(accelerator: Accelerator, model: Any, optimizer: Any, *, syncs: bool) -> None:
    """Run three backwards on process 0 and two on process 1 before each step."""
    count = 3 - dist.get_rank()
    for step in range(3):
        for micro in range(count):
            is_last = micro == count - 1
            with contextlib.nullcontext() if syncs or is_last else accelerator.no_sync(model):
                x, y = own_batch(3 * step + micro)
                accelerator.backward((model(x, "a") - y).square().mean() / count)
        optimizer.step()
        optimizer.zero_grad()


@on_paths("ddp", "zero0", "zero1", "zero2", "zero3", "zero1-cpu", "zero3-gathered", daily=("ddp", "zero2", "zero1-cpu"))
def test_uneven_backwards(path: str) -> None:
    """Their sum equals one device's.

    At stages 2 and 3, and if DDP averages each backward, an error names the counts.
    """
    if path.startswith(("zero2", "zero3")):
        with running(path) as accelerator:
            model, optimizer = _prepared(accelerator)
            words = ("number of backwards differs", "rank 1 ends it after 2", "rank 0", "stage 0 or 1")
            raised(LoopError, *words, by=lambda: _train_unevenly(accelerator, model, optimizer, syncs=True))
        return
    plain = Branching()
    sgd = _sgd(plain)
    for step in range(3):
        for p in plain.parameters():
            p.grad = torch.zeros_like(p)
        for rank, count in enumerate((3, 2)):
            for micro in range(count):
                x, y = (part.chunk(2)[rank] for part in global_batch(3 * step + micro))
                ((plain(x, "a") - y).square().mean() / 2 / count).backward()
        sgd.step()
    with running(path, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]) as accelerator:
        for syncs in (True, False) if path.startswith("zero") else (False,):
            model, optimizer = _prepared(accelerator)
            _train_unevenly(accelerator, model, optimizer, syncs=syncs)
            assert_near(weights(accelerator, model), plain.state_dict(), 1e-6)
            accelerator.free_memory()


@on_paths("zero0", "zero1", "zero2", "zero3", "zero2-cpu", "zero3-gathered", daily=("zero1", "zero2"))
def test_backwards_in_a_hook(path: str) -> None:
    """GradCache trains as on one device.

    At stages 2 and 3 an error says what to write instead, and that version trains.
    """
    (x, y), (own_x, own_y) = global_batch(0), own_batch(0)

    def gradients_of(model: Any, parts: tuple[Tensor, ...], y: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        with torch.no_grad():
            found = torch.cat([model(part, "a") for part in parts])
        found.requires_grad_()
        loss = (found - y).square().mean()
        return loss.detach().requires_grad_(), torch.autograd.grad(loss, found)[0].split(2)

    plain = Branching()
    sgd = _sgd(plain)
    for _ in range(2):
        for p in plain.parameters():
            p.grad = torch.zeros_like(p)
        (plain(x, "a") - y).square().mean().backward()
        sgd.step()
    for hooks in (True, False):
        with running(path) as accelerator:
            model, optimizer = _prepared(accelerator)

            def train() -> None:
                parts = own_x.split(2)
                for _ in range(2):
                    loss, gradients = gradients_of(model, parts, own_y)  # noqa: B023

                    def run(*_: Any) -> None:
                        with torch.enable_grad():
                            for part, gradient in zip(parts, gradients, strict=True):  # noqa: B023
                                (model(part, "a") * gradient).sum().backward()  # noqa: B023

                    if hooks:  # noqa: B023
                        loss.register_hook(run)
                        accelerator.backward(loss)
                    else:
                        for part, gradient in zip(parts, gradients, strict=True):
                            accelerator.backward((model(part, "a") * gradient).sum())  # noqa: B023
                    optimizer.step()  # noqa: B023
                    optimizer.zero_grad()  # noqa: B023

            if hooks and path.startswith(("zero2", "zero3")):
                raised(LoopError, "Either a hook of the loss runs", "in the loop", "use_reentrant=False", by=train)
                optimizer.zero_grad()
                continue
            train()
            assert_near(weights(accelerator, model), plain.state_dict(), 1e-6)
