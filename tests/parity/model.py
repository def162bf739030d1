"""The parity suite's model and data."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from cases import FEATURES, OUTPUTS, SAMPLES
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset


class Net(nn.Module):
    """A small regressor. `branch` takes part in the odd micro-batches only."""

    def __init__(self, width: int, branch: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, width)
        self.norm = nn.LayerNorm(width)
        self.hidden = nn.Linear(width, width)
        self.branch = nn.Linear(width, width) if branch else None
        self.out = nn.Linear(width, OUTPUTS)

    def forward(self, x: Tensor, use_branch: bool) -> Tensor:
        """Return predictions, [batch, OUTPUTS]."""
        x = self.norm(torch.tanh(self.embed(x)))
        x = x + nn.functional.silu(self.hidden(x))  # smooth: at a kink, rounding would decide the gradient
        if self.branch is not None and use_branch:
            x = x + torch.tanh(self.branch(x))
        return self.out(x)


def make_model(width: int, branch: bool) -> Net:
    """Build the same weights on every process and in the reference."""
    torch.manual_seed(7)
    return Net(width, branch)


def make_data(samples: int) -> tuple[Tensor, Tensor]:
    """Return inputs [samples, FEATURES] and targets [samples, OUTPUTS]."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    y = torch.sin(2 * x[:, :OUTPUTS]) + 0.1 * torch.randn(SAMPLES, OUTPUTS, generator=generator)
    return x[:samples], y[:samples]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """The same samples as a stream without a length."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(self.x, self.y, strict=True)


def make_loader(samples: int, data: str, batch_size: int) -> DataLoader[tuple[Tensor, ...]]:
    """Build the loader of a case: the samples in order."""
    x, y = make_data(samples)
    if data == "stream":
        return DataLoader(Stream(x, y), batch_size=batch_size)
    dataset = TensorDataset(x, y)
    if data == "sampler":
        return DataLoader(dataset, batch_sampler=BatchSampler(SequentialSampler(dataset), batch_size, drop_last=False))
    return DataLoader(dataset, batch_size=batch_size)


def parameter_groups(model: nn.Module, lr: float, grouped: bool) -> list[dict[str, object]]:
    """Return one group, or two: weights, and the rest with half the learning rate and no weight decay."""
    if not grouped:
        return [{"params": list(model.parameters())}]
    weights = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": weights}, {"params": others, "lr": lr / 2, "weight_decay": 0.0}]


def code_schedule(step: int) -> float:
    """Build the LambdaLR of the cases without a section."""
    return min(1.0, (step + 1) / 3) * 0.95**step
