"""Batch samplers used directly. For every small size they follow Accelerate's rule, which scripts rely on."""

from __future__ import annotations

from itertools import cycle, islice

import pytest
from torch.utils.data import BatchSampler, IterableDataset

from zero_plugin.data.batch_sampler import BatchSamplerShard, SkipBatchSampler
from zero_plugin.data.stream import IterableDatasetShard


class Stream(IterableDataset):
    """A stream of 0 … size-1."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self):
        return iter(range(self.size))


def batches_by_rule(samples: int, step: int, world: int, rank: int, *, even: bool, drop_last: bool) -> list[list[int]]:
    """Cut each `step` samples into one equal part per process. The last ones are completed, kept or dropped."""
    own, batches = step // world, []
    for start in range(0, samples, step):
        taken = list(range(start, min(start + step, samples)))
        if len(taken) < step and drop_last:
            break
        if even:
            taken += islice(cycle(range(min(step, samples))), step - len(taken))
        batches.append(taken[rank * own : (rank + 1) * own])
    return [batch for batch in batches if batch]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_shard_is_each_step_s_part(world: int, split: bool, even: bool, drop_last: bool) -> None:
    """Full steps are divided in order. An incomplete last step follows the rule of the three options."""
    for size in (1, 2, 4):
        batch_size = size * world if split else size
        for samples in range(3 * size * world + 2):
            for rank in range(world):
                sampler = BatchSampler(range(samples), batch_size, drop_last)
                shard = BatchSamplerShard(sampler, world, rank, split, even)
                expected = batches_by_rule(samples, size * world, world, rank, even=even, drop_last=drop_last)
                assert list(shard) == expected, (samples, batch_size)
                assert (len(shard), shard.total_length) == (len(expected), len(sampler))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_stream_s_shard_is_each_step_s_part(world: int, split: bool, drop_last: bool) -> None:
    """A stream's samples follow the same rule. The last step is always completed or dropped."""
    for size in (1, 2, 4):
        batch_size = size * world if split else size
        for samples in range(3 * size * world + 2):
            for rank in range(world):
                shard = IterableDatasetShard(Stream(samples), batch_size, drop_last, world, rank, split)
                batches = batches_by_rule(samples, size * world, world, rank, even=True, drop_last=drop_last)
                assert list(shard) == [sample for batch in batches for sample in batch], (samples, batch_size)
                assert len(shard) == len(list(shard))


def test_batches_of_varying_size_are_dealt_out_whole() -> None:
    """Without a common size, a missing batch is replaced by one of the first, or left out."""
    batches = [[0, 1, 2], [3, 4], [5, 6, 7, 8], [9, 10, 11], [12, 13]]
    uneven = [BatchSamplerShard(batches, 2, rank, even_batches=False) for rank in range(2)]
    assert [list(shard) for shard in uneven] == [[batches[0], batches[2], batches[4]], [batches[1], batches[3]]]
    assert [len(shard) for shard in uneven] == [3, 2]
    assert list(BatchSamplerShard(batches, 2, 1)) == [batches[1], batches[3], batches[0]]


def test_even_batches_can_change() -> None:
    """A changed `even_batches` counts from the next epoch."""
    shard = BatchSamplerShard(BatchSampler(range(3), 1, False), 2, 1)
    assert list(shard) == [[1], [0]]
    shard.even_batches = False
    assert (list(shard), len(shard)) == ([[1]], 1)


def test_what_cannot_be_split_is_refused() -> None:
    """A batch size that is no multiple of the number of processes is refused."""
    for batches in (BatchSampler(range(9), 3, False), [[0, 1]]):
        with pytest.raises(ValueError, match="split_batches"):
            BatchSamplerShard(batches, 2, split_batches=True)
    with pytest.raises(ValueError, match="batch size 3 cannot be split among 2"):
        IterableDatasetShard(Stream(4), 3, num_processes=2, split_batches=True)


def test_skipping_is_for_every_epoch() -> None:
    """The first batches are left out in each epoch. The sampler that is skipped through can be read."""
    sampler = BatchSampler(range(16), 4, False)
    later = SkipBatchSampler(sampler, 2)
    assert list(later) == list(later) == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert (len(later), later.total_length, later.batch_size, later.sampler) == (2, 4, 4, sampler.sampler)
    assert len(SkipBatchSampler(sampler, 9)) == 0
