import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from zero_plugin.probe.loop import probe_loop

DATA = TensorDataset(torch.arange(22), torch.arange(22))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(6).split(2))


class Ragged:
    """A batch sampler without a stated size."""

    def __iter__(self):
        return iter([[0, 1, 2], [3]])

    def __len__(self):
        return 2


@pytest.mark.parametrize(
    ("loader", "size", "fixed", "batches"),
    [
        (DataLoader(DATA, batch_size=4), 4, True, 3),
        (DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 5, drop_last=False)), 5, True, 3),
        (DataLoader(DATA, batch_sampler=Ragged()), 3, False, 1),
        (DataLoader(DATA, batch_sampler=Ragged(), collate_fn=lambda b: {"x": [torch.zeros(len(b), 2)]}), 3, False, 1),
        (DataLoader(Stream(), batch_size=None), None, False, None),
        (DataLoader(Stream(), batch_size=2), 2, True, None),
    ],
)
def test_the_batch_size_is_found(loader, size, fixed, batches):
    """Stated by the loader, by its batch sampler, seen on one batch, or unknown for a stream that must not be read."""
    facts = probe_loop([loader], processes=2)
    assert (facts.micro_batch, facts.micro_batch_fixed, facts.batches_per_epoch) == (size, fixed, batches)
    assert bool(facts.micro_batch_reason) is (size is not None)


def test_the_training_loader_is_the_one_that_shuffles():
    """An evaluation loader that comes first does not decide."""
    evaluation, training = DataLoader(DATA, batch_size=11), DataLoader(DATA, batch_size=2, shuffle=True)
    assert probe_loop([evaluation, training]).micro_batch == 2
    assert probe_loop([evaluation]).micro_batch == 11
    assert probe_loop([]).micro_batch is None


def test_split_batches_and_prepared_loaders():
    """A split batch counts per process; a loader that is already one process's share is not divided again."""
    split = probe_loop([DataLoader(DATA, batch_size=8)], processes=4, split_batches=True)
    assert (split.micro_batch, split.batches_per_epoch) == (2, 3)
    assert "8 ÷ 4" in split.micro_batch_reason
    assert probe_loop([DataLoader(DATA, batch_size=8)], processes=4, sharded=True).batches_per_epoch == 3
