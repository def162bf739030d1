"""An example batch is read without taking it from the loop and without drawing a random number."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

from zero_plugin.data.prepare import peek_batch


class Growing(Dataset[dict[str, Tensor]]):
    """A dataset with samples of random lengths. Records which samples were read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.read.append(index)
        random.random(), np.random.rand(), torch.rand(1)
        return {"ids": torch.ones(index + 1, dtype=torch.long)}


def padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {"ids": torch.nn.utils.rnn.pad_sequence([sample["ids"] for sample in samples], batch_first=True)}


class Stream(IterableDataset[int]):
    """A stream whose samples are consumed when read."""

    def __iter__(self) -> Iterator[int]:
        pytest.fail("nobody may draw from it")


def test_the_longest_of_samples_over_the_whole_data_set() -> None:
    """The example is the longest of eight samples from the first to the last, padded like the loop's batches."""
    data = Growing()
    batch = peek_batch([DataLoader(data, batch_size=2, collate_fn=padded, shuffle=True)])
    assert batch["ids"].shape == (8, 100)
    assert data.read[0] == 0
    assert data.read[-1] == 99


def test_no_random_number_and_no_order_changes() -> None:
    """The generators of Python, NumPy and torch, and the sampler's order, do not change."""

    def draws(peek: bool) -> list[Any]:
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        loader = DataLoader(Growing(), batch_size=4, collate_fn=padded, shuffle=True)
        if peek:
            peek_batch([loader])
        first = next(iter(loader))["ids"].sum().item()
        return [first, random.random(), np.random.rand(), torch.rand(1).item()]

    assert draws(peek=True) == draws(peek=False)


def test_the_loader_that_shuffles_is_the_one_that_trains() -> None:
    """The first loader that shuffles is used, or the first of all if none does."""
    still = DataLoader(TensorDataset(torch.zeros(4, 2)))
    shuffled = DataLoader(TensorDataset(torch.zeros(4, 3)), shuffle=True)
    assert peek_batch([still, shuffled])[0].shape[1] == 3
    assert peek_batch([still, still])[0].shape[1] == 2


def test_a_sampler_of_whole_batches() -> None:
    """A dataset that is indexed by lists of samples gets a list."""
    data = TensorDataset(torch.arange(20.0).reshape(10, 2))
    loader = DataLoader(data, sampler=BatchSampler(SequentialSampler(data), 5, False), batch_size=None)
    assert peek_batch([loader])[0].shape == (8, 2)


@pytest.mark.parametrize(
    "data", [Stream(), TensorDataset(torch.zeros(0, 2)), {"a": 1}], ids=["stream", "empty", "other keys"]
)
def test_what_cannot_be_looked_at_gives_none(data: Any) -> None:
    """A stream is not read, and a dataset that fails gives no example and no error."""
    assert peek_batch([DataLoader(data, batch_size=2)]) is None
    assert peek_batch([]) is None
