"""Division of index batches, for every small size, on simulated processes."""

from __future__ import annotations

from itertools import chain, cycle, islice

import pytest
from torch.utils.data import BatchSampler, SequentialSampler

from zero_plugin.data.batch_sampler import BatchSamplerShard
from zero_plugin.data.sharing import Share, Sharing, share_batches
from zero_plugin.errors import LoopError

WORLDS = [1, 2, 3, 4]
BATCH_SIZES = [1, 2, 3, 5, 8]
SAMPLES = range(41)


def batches_of(samples: int, batch_size: int, drop_last: bool = False) -> list[list[int]]:
    return list(BatchSampler(range(samples), batch_size, drop_last))


def all_shares(batches: list[list[int]], world: int, **how) -> tuple[list[list[Share]], list[int]]:
    """Return each rank's batches, and the number of dropped samples that rank 0 reports."""
    dropped: list[int] = []
    shares = [
        list(share_batches(batches, Sharing(rank, world, **how), dropped.append if rank == 0 else lambda _: None))
        for rank in range(world)
    ]
    return shares, dropped


def indices_by_step(shares: list[list[Share]]) -> list[list[int]]:
    assert len({len(own) for own in shares}) == 1, "every process has equally many batches"
    return [[index for share in step for index in share.indices] for step in zip(*shares, strict=True)]


def flat(steps: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(steps))


def real_indices(shares: list[list[Share]]) -> list[int]:
    return [i for step in zip(*shares, strict=True) for share in step for i in share.indices[: share.real]]


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_even_batches_complete_the_last_step_from_the_first_samples(world: int, split: bool) -> None:
    """All processes get full batches. Together they are the epoch in order, then its first samples, repeatedly."""
    for batch_size in BATCH_SIZES:
        per_step = batch_size * world
        for samples in SAMPLES:
            batches = batches_of(samples, per_step if split else batch_size)
            shares, dropped = all_shares(batches, world, batch_size=batch_size, split=split)
            steps = -(-samples // per_step)
            head = cycle(range(min(samples, per_step)))
            expected = list(range(samples)) + list(islice(head, steps * per_step - samples if samples else 0))
            assert flat(indices_by_step(shares)) == expected
            assert all(len(share.indices) == share.samples == batch_size for own in shares for share in own)
            assert real_indices(shares) == list(range(samples))
            assert dropped == []


@pytest.mark.parametrize("world", WORLDS)
def test_each_step_is_consecutive_batches_of_one_process_s_loader(world: int) -> None:
    """Step k is batches k·world … (k+1)·world-1 in rank order, so gradients are those of the global batch."""
    for samples in SAMPLES:
        batches = batches_of(samples, 3)
        shares, _ = all_shares(batches, world, batch_size=3)
        for step, taken in enumerate(zip(*shares, strict=True)):
            for batch, share in zip(batches[step * world : (step + 1) * world], taken, strict=False):
                assert share.indices[: len(batch)] == batch


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("world", [2, 3])
def test_uneven_batches_stop_together_and_tell_what_is_left_out(world: int, split: bool) -> None:
    """With even_batches off no sample repeats. All ranks stop at the shortest. Taken plus dropped is the epoch."""
    for batch_size in BATCH_SIZES:
        for samples in SAMPLES:
            batches = batches_of(samples, batch_size * world if split else batch_size)
            shares, dropped = all_shares(batches, world, batch_size=batch_size, split=split, even=False)
            taken = flat(indices_by_step(shares))
            assert taken == list(range(samples - sum(dropped)))
            assert all(share.real == share.samples == len(share.indices) > 0 for own in shares for share in own)
            assert sum(dropped) <= (world - 1) * batch_size


@pytest.mark.parametrize("even", [True, False])
def test_drop_last_leaves_out_the_incomplete_step(even: bool) -> None:
    """drop_last acts like one process with the global batch and drop_last. It is configured, so nothing is reported."""
    for samples in SAMPLES:
        shares, dropped = all_shares(batches_of(samples, 2, True), 3, batch_size=2, even=even, drop_last=True)
        assert flat(indices_by_step(shares)) == list(range(samples // 6 * 6))
        assert dropped == []


def test_one_process_is_plain_torch() -> None:
    """One process gets the loader's own batches, including the shorter last one."""
    batches = batches_of(10, 4)
    shares, dropped = all_shares(batches, 1, batch_size=4, even=False)
    assert [share.indices for share in shares[0]] == batches
    assert dropped == []


def test_batches_of_varying_size_are_completed_whole() -> None:
    """Without a batch size, a process without a batch in the last step gets one of the first batches again."""
    batches = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9]]
    shares, _ = all_shares(batches, 3, batch_size=None)
    assert [[share.indices for share in own] for own in shares] == [
        [[0, 1, 2], [6, 7, 8, 9]],
        [[3], [0, 1, 2]],
        [[4, 5], [3]],
    ]
    assert real_indices(shares) == list(range(10))


def test_a_short_batch_midway_is_not_filled_up() -> None:
    """Short batches in the middle, as from a bucketing sampler, are divided unchanged."""
    batches = [[0, 1], [2], [3, 4], [5]]
    shares, _ = all_shares(batches, 2, batch_size=2)
    assert indices_by_step(shares) == [[0, 1, 2], [3, 4, 5, 0]]


@pytest.mark.parametrize("batches", [[[0, 1], [2, 3, 4, 5]], [[0, 1, 2, 3, 4, 5, 6, 7]]], ids=["short", "long"])
def test_splitting_wants_full_batches(batches: list[list[int]]) -> None:
    """A batch that cannot be cut into one piece per process is an error, not a process without data."""
    with pytest.raises(LoopError, match=r"2 × 2.*split_batches=False"):
        all_shares(batches, 2, batch_size=2, split=True)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("report", [None, lambda _: None], ids=["by hand", "prepared"])
def test_the_length_is_the_number_of_batches(world: int, split: bool, even: bool, drop_last: bool, report) -> None:
    """len() is the number of batches that iteration yields, for every size and way of division, also after skipping."""
    for batch_size in BATCH_SIZES:
        for samples in SAMPLES:
            sampler = BatchSampler(SequentialSampler(range(samples)), batch_size * (world if split else 1), drop_last)
            shard = BatchSamplerShard(sampler, world, world - 1, split, even and world > 1, report_dropped=report)
            drawn = list(shard)
            assert len(shard) == len(drawn)
            assert len(shard.counts) == len(drawn)
            shard.skip = 2
            assert [list(shard), list(shard)] == [drawn[2:], drawn], "of one epoch"
