"""Batches that are cut into pieces equal those of a loader with the smaller batch size, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler, TensorDataset

from zero_plugin.data.batch_sampler import cut_batches, smaller_cut
from zero_plugin.data.prepare import prepare_loader
from zero_plugin.errors import LoopError

DATA = TensorDataset(torch.arange(22))


class Stream(IterableDataset[int]):
    """A stream of 0 … 21 without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(22))


class Bucketed:
    """A user's batch sampler that gets the epoch."""

    batch_size = 4
    drop_last = False

    def __init__(self) -> None:
        self.sampler = SequentialSampler(DATA)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([self.epoch, 5, 6, 7], [8, 9, 10, 11], [2, 3])

    def __len__(self) -> int:
        return 3


def shuffled(size: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(DATA, size, shuffle=True, generator=torch.Generator().manual_seed(3), **options)


def by_sampler(size: int) -> DataLoader[Any]:
    """Pass a batch sampler as the sampler, so the dataset gets indices of complete batches."""
    sampler = RandomSampler(DATA, generator=torch.Generator().manual_seed(3))
    return DataLoader(DATA, batch_size=None, sampler=BatchSampler(sampler, size, drop_last=False))


LOADERS: dict[str, Callable[[int], DataLoader[Any]]] = {
    "shuffled": shuffled,
    "in order": lambda size: DataLoader(DATA, size),
    "stream": lambda size: DataLoader(Stream(), size),
    "stream, without its tail": lambda size: DataLoader(Stream(), size, drop_last=True),
    "sampler of batches": by_sampler,
}


def epochs(loader: DataLoader[Any], rank: int, world: int, **options: Any) -> list[Any]:
    """Return two epochs of one rank's part, and the length."""
    prepared = prepare_loader(loader, rank=rank, world_size=world, device=None, **options)
    length = None if isinstance(loader.dataset, IterableDataset) else len(prepared)
    return [length, *([torch.as_tensor(b[0] if isinstance(b, list) else b).tolist() for b in prepared] for _ in "ab")]


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_cut_batches_are_those_of_a_loader_built_so(kind: str, split: bool) -> None:
    """One process gets the same samples in the same order and as many steps, also with `split_batches`."""
    build = LOADERS[kind]
    assert epochs(build(8), 0, 1, split_batches=split, cut=2) == epochs(build(4), 0, 1, split_batches=split)


def test_what_drop_last_leaves_out_stays_out() -> None:
    """drop_last drops the last 6 of 22 samples in batches of 8, cut or not."""
    _, first, _ = epochs(shuffled(8, drop_last=True), 0, 1, cut=2)
    _, whole, _ = epochs(shuffled(8, drop_last=True), 0, 1)
    assert [len(batch) for batch in first] == [4] * 4
    assert list(chain(*first)) == list(chain(*whole))


def test_a_batch_sampler_of_the_users_own() -> None:
    """A user's batch sampler is cut too, and still gets the epoch."""
    sampler = Bucketed()
    prepared = prepare_loader(DataLoader(DATA, batch_sampler=sampler), rank=0, world_size=1, device=None, cut=2)
    assert prepared.batch_size == 2
    prepared.set_epoch(1)
    assert [batch[0].tolist() for batch in prepared] == [[1, 5], [6, 7], [8, 9], [10, 11], [2, 3]]


def test_a_seedable_sampler_shuffles_as_before() -> None:
    """A seedable sampler first replaces torch's own, then the batches are cut."""
    options: dict[str, Any] = {"use_seedable_sampler": True, "data_seed": 5}
    whole, cut = (epochs(shuffled(8), 0, 1, cut=cut, **options)[1:] for cut in (1, 2))
    assert [list(chain(*epoch)) for epoch in cut] == [list(chain(*epoch)) for epoch in whole]


def test_what_cannot_be_cut() -> None:
    """Cutting is refused for a training loader. An evaluation loader keeps its batches."""
    with pytest.raises(LoopError, match="batch_size=6, which cannot be cut"):
        cut_batches(shuffled(6), 4)
    with pytest.raises(LoopError, match="a multiple of 8"):
        cut_batches(shuffled(12), 4, split_among=2)
    evaluation = DataLoader(DATA, 6)
    assert cut_batches(evaluation, 4) is evaluation


def test_of_a_stream_only_what_fills_no_smaller_batch_is_left_out() -> None:
    """Only the last 2 of 22 stream samples are dropped, in batches of 8 cut in two. A stream does not know its end."""
    _, first, _ = epochs(DataLoader(Stream(), 8, drop_last=True), 0, 1, cut=2)
    assert list(chain(*first)) == list(range(20))


@given(st.integers(1, 200))
def test_the_next_cut_makes_equal_pieces(micro_batch: int) -> None:
    """The next cut is the smallest one that leaves whole samples. At one sample no cut is left."""
    pieces = smaller_cut(micro_batch)
    if micro_batch == 1:
        assert pieces == 0
        return
    assert micro_batch % pieces == 0
    assert all(micro_batch % fewer for fewer in range(2, pieces))
