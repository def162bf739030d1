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
from zero_plugin.plan.run_plan import probe_loop

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
        (DataLoader(DATA, batch_sampler=[[0, 1, 2], [3]]), 3, False, 1),
        (DataLoader(DATA, batch_sampler=Ragged()), None, False, 1),
        (DataLoader(DATA, batch_size=None, sampler=BatchSampler(SequentialSampler(DATA), 4, False)), 4, True, 3),
        (DataLoader(torch.arange(6).split(2), batch_size=None), None, False, 2),
        (DataLoader(Stream(), batch_size=None), None, False, None),
        (DataLoader(Stream(), batch_size=2), 2, True, None),
    ],
)
def test_the_batch_size_is_found(loader, size, fixed, batches):
    """The loader or its batch sampler states it, or a list of batches shows it.

    Otherwise it is unknown; nothing is read.
    """
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
    """A split batch counts per process. A loader whose sampler divides the data is not divided again."""
    split = probe(DataLoader(DATA, batch_size=8), processes=4, split_batches=True)
    assert (split.micro_batch, split.batches_per_epoch) == (2, 3)
    assert "8 ÷ 4" in split.micro_batch_reason
    divided = DataLoader(DATA, batch_size=4, sampler=DistributedSampler(DATA, 2, 0))
    assert probe(divided, processes=2).batches_per_epoch == 3


def test_a_batch_sampler_is_left_alone():
    """A single-use sampler loses no batch, and one with its own generator gives torch's order."""

    class Own:
        def __init__(self):
            self.generator = torch.Generator().manual_seed(1)

        def __iter__(self):
            return iter(torch.randperm(8, generator=self.generator).view(4, 2).tolist())

        def __len__(self):
            return 4

    def batches(sampler, *, probed):
        loader = DataLoader(TensorDataset(torch.arange(8)), batch_sampler=sampler)
        prepared = prepare_loader(loader, rank=0, world_size=1, device=None)
        if probed:
            probe_loop([loader], [prepared])
        return [batch[0].tolist() for batch in prepared]

    for make in (Own, lambda: ([i, i + 1] for i in range(0, 8, 2))):
        assert batches(make(), probed=True) == batches(make(), probed=False)
