"""The net, data and loop that most kinds use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from loops import FEATURES, OUT, Plain
from torch import Tensor, nn
from torch.utils.data import Dataset

Weights = dict[str, Tensor]
Kind = Callable[[Plain], Weights]
STEPS = 4


def net() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, OUT))


def squared(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def sgd(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, **{"lr": 0.05, "momentum": 0.9, **options})


def train(
    loop: Plain,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Any, int], Tensor] | None = None,
    schedule: Any = None,
    after: Callable[[Any, int], None] | None = None,
) -> Weights:
    """Run the common loop: backward, step, schedule, zero_grad."""
    objects = loop.prepare(model, optimizer, *([schedule] if schedule else []))
    model, optimizer = objects[:2]
    for step in range(STEPS):
        value = loss(model, step) if loss else squared(model, loop.batch(step))
        loop.backward(value)
        if after:
            after(model, step)
        optimizer.step()
        if schedule:
            objects[2].step()
        optimizer.zero_grad()
    return loop.weights(model)


def with_sgd(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build a net and its optimizer."""
    model = net()
    return model, sgd(model.parameters(), **options)


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """A number of inputs and targets, which a loader divides into batches."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(11)
        self.x, self.y = torch.randn(count, FEATURES, generator=generator), torch.randn(count, OUT, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]
