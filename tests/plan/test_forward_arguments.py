"""A loop's possible arguments of a forward, guessed from its batches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zero_plugin.plan.model_source import forward_arguments


class Named(nn.Module):
    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        return ids


class Open(nn.Module):
    def forward(self, **inputs: Tensor) -> Tensor:
        return inputs["ids"]


def test_of_a_mapping_the_known_keys() -> None:
    """Keys that the forward does not name are left out unless it takes any keyword."""
    batch = {"ids": torch.ones(1), "index": torch.ones(1)}
    assert list(next(forward_arguments(Named(), batch))) == ["ids"]
    assert list(next(forward_arguments(Open(), batch))) == ["ids", "index"]


def test_of_a_pair_all_then_the_first() -> None:
    """Inputs and targets: both, then without the targets."""
    x, y = torch.ones(1), torch.ones(2)
    found = [len(example) for example in forward_arguments(Named(), (x, y))]
    assert found == [2, 1, 1]
    assert [len(example) for example in forward_arguments(Named(), x)] == [1]
    assert list(forward_arguments(Named(), None)) == []
