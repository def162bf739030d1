"""The shuffle that depends only on seed and epoch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from zero_plugin import Accelerator, DataLoaderConfiguration
from zero_plugin.data.sharing import SeedableRandomSampler


def test_seed_and_epoch_decide_the_order() -> None:
    """The order ignores earlier draws and the state of the given generator."""
    torch.manual_seed(5)
    sampler = SeedableRandomSampler(range(20))
    epochs = [list(sampler) for _ in range(3)]
    assert len(set(map(tuple, epochs))) == 3
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    torch.manual_seed(99)
    again = SeedableRandomSampler(range(20), data_seed=5, generator=torch.Generator().manual_seed(1))
    again.set_epoch(2)
    assert list(again) == epochs[2]
    again.set_epoch(0)
    assert [list(again), list(again)] == epochs[:2]
    assert list(SeedableRandomSampler(range(20))) != epochs[0]


def test_an_epoch_left_early_begins_again() -> None:
    """An epoch left early starts again. Only a complete iteration counts, unless set_epoch is called."""
    sampler = SeedableRandomSampler(range(9), data_seed=1)
    first = next(iter(sampler))
    assert next(iter(sampler)) == first
    assert sampler.epoch == 0


class Backwards(RandomSampler):
    """A script's own order in a subclass of a random sampler."""

    def __iter__(self) -> Iterator[int]:
        """Yield indices from the end."""
        return iter(range(len(self.data_source) - 1, -1, -1))


def test_a_subclass_with_an_order_of_its_own_is_kept() -> None:
    """A subclass with its own order keeps it. Only torch's own random order is seeded by epoch."""
    data = TensorDataset(torch.arange(6))
    for make in (
        lambda: DataLoader(data, batch_size=2, sampler=Backwards(data)),
        lambda: DataLoader(data, batch_sampler=BatchSampler(Backwards(data), 2, drop_last=False)),
    ):
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
        loader = accelerator.prepare(make())
        assert [batch.tolist() for (batch,) in loader] == [[5, 4], [3, 2], [1, 0]]
        accelerator.end_training()
