"""The shuffle that depends on seed and epoch alone."""

from __future__ import annotations

import torch

from zero_plugin.data.batch_sampler import SeedableRandomSampler


def test_seed_and_epoch_decide_the_order() -> None:
    """Not what was drawn before, nor the state of the generator that it is given."""
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
    """Only a whole iteration counts, unless set_epoch says otherwise."""
    sampler = SeedableRandomSampler(range(9), data_seed=1)
    first = next(iter(sampler))
    assert next(iter(sampler)) == first
    assert sampler.epoch == 0
