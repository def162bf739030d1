"""Processes that take different branches of a model: conditional computation, layers that are left out at random."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from paths import assert_near, checks_on, global_batch, own_batch, raised, running, same, weights
from torch import Tensor, nn

from zero_plugin import Accelerator
from zero_plugin.errors import LoopError

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
    """Two branches of equal size, and one of another."""

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
    """On one device, with the batches and branches of both processes; what no process reaches has a zero gradient."""
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


def check_each_process_counts(path: str) -> None:
    """What a process does not reach counts as 0 there: the numbers, and the clipping, are those of one device."""
    for precision, tolerance in (("no", 1e-6), ("bf16", 1e-2)):
        with running(path, gradient_accumulation_steps=_MICRO_BATCHES, mixed_precision=precision) as accelerator:
            model, optimizer = _prepared(accelerator)
            _train(accelerator, model, optimizer, _DIFFERENT)
            assert_near(weights(accelerator, model), _train_plainly(_DIFFERENT), tolerance)


def check_different_branches_are_refused(path: str) -> None:
    """Where gradients are summed as they come: on every process, before the mixture is applied; what differs is named.

    In the first windows before the reduction, so that unequal sizes are found; later in time for the step.
    """
    words = ("different branches", "rank 0", "rank 1", "stage 1")
    for careful in (True, False):
        with running(path, gradient_accumulation_steps=_MICRO_BATCHES) as accelerator:
            model, optimizer = _prepared(accelerator)
            before = weights(accelerator, model)
            ways = [way for way in _DIFFERENT if careful or way not in ("one more", "of another size")]
            if not careful:
                optimizer.session._gradients._order._careful = 0
            for way in ways:
                raised(LoopError, *words, by=lambda: _train(accelerator, model, optimizer, [way]))  # noqa: B023
                assert same(weights(accelerator, model), before)
                if path.startswith("zero3"):  # what a forward gathered, it has not released
                    break
                optimizer.zero_grad()
            else:
                _train(accelerator, model, optimizer, ["at one"] * 2)
                assert_near(weights(accelerator, model), _train_plainly(["at one"] * 2), 1e-6)


_CHECKS = {
    **checks_on(["zero0", "zero1", "zero1-cpu"], [check_each_process_counts]),
    **checks_on(["zero2", "zero2-cpu", "zero3", "zero3-cpu", "zero3-gathered"], [check_different_branches_are_refused]),
}
CHECKS = {name: ([2], check) for name, (_, check) in _CHECKS.items()}
