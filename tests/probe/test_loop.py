import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

from zero_plugin.data.prepare import prepare_loader
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


def probe(*loaders, processes=1, **options):
    prepared = [prepare_loader(o, rank=0, world_size=processes, device=None, **options) for o in loaders]
    return probe_loop(loaders, prepared, processes=processes, **options)


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
    facts = probe(loader, processes=2)
    assert (facts.micro_batch, facts.micro_batch_fixed, facts.batches_per_epoch) == (size, fixed, batches)
    assert bool(facts.micro_batch_reason) is (size is not None)


def test_the_training_loader_is_the_one_that_shuffles():
    """An evaluation loader that comes first does not decide."""
    evaluation, training = DataLoader(DATA, batch_size=11), DataLoader(DATA, batch_size=2, shuffle=True)
    facts = probe(evaluation, training)
    assert (facts.micro_batch, facts.batches_per_epoch) == (2, 11)
    assert probe(evaluation).micro_batch == 11
    assert probe().micro_batch is None


def test_split_batches_and_loaders_divided_already():
    """A split batch counts per process; a loader whose sampler divides the data is not divided again."""
    split = probe(DataLoader(DATA, batch_size=8), processes=4, split_batches=True)
    assert (split.micro_batch, split.batches_per_epoch) == (2, 3)
    assert "8 ÷ 4" in split.micro_batch_reason
    divided = DataLoader(DATA, batch_size=4, sampler=DistributedSampler(DATA, 2, 0))
    assert probe(divided, processes=2).batches_per_epoch == 3


def test_looking_at_a_first_batch_leaves_no_trace():
    """The random numbers that a batch sampler draws for it are given back, and nothing is read."""
    read = []

    class Shuffled(Ragged):
        def __iter__(self):
            return iter([torch.randperm(3).tolist()])

    class Reading(TensorDataset):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    torch.manual_seed(1)
    expected = torch.rand(())
    torch.manual_seed(1)
    facts = probe(DataLoader(Reading(torch.arange(22)), batch_sampler=Shuffled()))
    assert (facts.micro_batch, read) == (3, [])
    assert torch.rand(()) == expected
    ready = probe(DataLoader(torch.arange(6).split(2), batch_size=None))
    assert (ready.micro_batch, ready.micro_batch_fixed) == (2, False)
