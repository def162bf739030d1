"""A small model with all parts that are hard to spread: both kinds of buffers, ties, blocks, a direct tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.inner = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.randn(width))
        self.register_buffer("shift", torch.arange(float(width)), persistent=False)
        self.norm.running_mean = torch.randn(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(self.norm(x))) * self.scale + self.get_buffer("shift")


class Model(nn.Module):
    """A model with tied embedding and head, and two blocks."""

    def __init__(self, width: int = 6, words: int = 11, bias: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.head = nn.Linear(width, words, bias=bias)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, temperature: float = 1.0) -> dict[str, Tensor]:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(x) / temperature}


@pytest.fixture
def make() -> Callable[[], Model]:
    """Create models with the same weights each time, in evaluation mode."""

    def build() -> Model:
        torch.manual_seed(3)
        return Model().eval()

    return build


@pytest.fixture
def tokens() -> Tensor:
    return torch.tensor([3, 1, 4, 1, 5])
