"""Exact gathering for every dataset size, batch size, way of division and kind of value, over real processes."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from on_paths import in_processes, on_rows, row
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from zero_plugin.data.batches import gather_for_metrics
from zero_plugin.data.loader import DataLoaderShard
from zero_plugin.data.prepare import prepare_loader
from zero_plugin.distributed.collectives import num_processes, process_index
from zero_plugin.errors import LoopError

# Dataset sizes and batch sizes. "short" runs daily.
SIZES = {"short": ((2, 7, 12), (1, 3)), "full": (range(1, 41), range(1, 10))}
ROWS = [
    row("", world, extent, daily=extent == "short")
    for extent, first in (("short", 2), ("full", 1))
    for world in range(first, 4)
]


class Stream(IterableDataset):
    """A stream of 0 … size-1, equal on every process."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self):
        return iter(range(self.size))


class Sharded(Stream):
    """A stream with a `shard` method, whose first shards are longer."""

    numbers = None

    def shard(self, num_shards: int, index: int) -> Sharded:
        part = Sharded(self.size)
        part.numbers = range(index, self.size, num_shards)
        return part

    def __iter__(self):
        return iter(range(self.size) if self.numbers is None else self.numbers)


class DividedByRank(Stream):
    """A stream that gives each process a separate part of a different length."""

    def __iter__(self):
        return iter(range(process_index(), self.size, num_processes()))


class RankSampler:
    """A user's sampler for several processes."""

    def __init__(self, size: int) -> None:
        self.num_replicas, self.rank, self.size = num_processes(), process_index(), size

    def __iter__(self):
        return iter(range(self.rank, self.size, self.num_replicas))


def prepared(loader: DataLoader, **options) -> DataLoaderShard:
    return prepare_loader(loader, rank=process_index(), world_size=num_processes(), device=None, **options)


def collect(loader: DataLoaderShard) -> tuple[list[int], int]:
    """Run an evaluation loop. Return the samples (checked as tensors, nested, and objects) and values per batch."""
    seen, batch_values = [], 0
    for batch in loader:
        tree = {"cubes": [batch**3, torch.stack([batch, -batch], dim=1)], "mean": batch.float().mean()}
        got = gather_for_metrics(tree, loader)
        objects = gather_for_metrics([f"{value}" for value in batch.tolist()], loader, use_gather_object=True)
        values = [int(value) for value in objects]
        assert got["cubes"][0].tolist() == [value**3 for value in values]
        assert got["cubes"][1].tolist() == [[value, -value] for value in values]
        array = gather_for_metrics({"array": torch.stack([batch, -batch], dim=1).numpy()}, loader)["array"]
        assert array.tolist() == [[value, -value] for value in values]
        batch_values += len(got["mean"])
        seen += values
    return seen, batch_values


def kept(samples: int, batch: int, *, even: bool, drop_last: bool) -> int:
    """Return how many of the first samples are seen, with `batch` samples per process and step."""
    world = num_processes()
    full, tail = divmod(samples, batch * world)
    if drop_last or not (even or tail > batch * (world - 1)):
        tail = 0
    return full * batch * world + tail


@on_rows(("extent",), ROWS)
def test_every_sharing(extent: str) -> None:
    """Map-style data and a stream give the dataset in order, once, or as much of it as was requested."""
    sizes, batches = SIZES[extent]
    for samples, batch, even, drop_last, split in product(sizes, batches, *[(True, False)] * 3):
        expected = list(range(kept(samples, batch, even=even, drop_last=drop_last)))
        for data in (range(samples), Stream(samples)):
            loader = DataLoader(data, batch_size=batch * (num_processes() if split else 1), drop_last=drop_last)
            found = collect(prepared(loader, even_batches=even, split_batches=split))
            assert found == (expected, -(-len(expected) // batch)), (samples, batch, even, drop_last, split, data)


@on_rows(("extent",), ROWS)
def test_data_that_others_divide(extent: str) -> None:
    """Data divided by a DistributedSampler, `shard` or rank give each sample once, though parts differ."""
    sizes, batches = SIZES[extent]
    for samples, batch in product(sizes, batches[:2]):
        if samples < num_processes():  # a process without any sample cannot continue
            continue
        sampler = DistributedSampler(range(samples), num_processes(), process_index(), shuffle=False)
        by_sampler = DataLoader(range(samples), batch_size=batch, sampler=sampler)
        by_method = prepared(DataLoader(Sharded(samples), batch_size=batch))
        by_rank = prepared(DataLoader(DividedByRank(samples), batch_size=batch), shard_iterable="never")
        for loader in (prepared(by_sampler), by_method, by_rank):
            found, _ = collect(loader)
            assert sorted(found) == list(range(samples)), (samples, batch, loader.dataset)


@in_processes(2, 3)
def test_batches_that_nobody_counts() -> None:
    """Batches made by the dataset or a batch sampler are divided whole, and repeated ones are left out."""
    ready = [torch.arange(n) + 10 * n for n in (1, 2, 3, 4, 5, 6, 7)]
    assert collect(prepared(DataLoader(ready, batch_size=None))) == (torch.cat(ready).tolist(), 7)
    varying = [[0], [1, 2], [3, 4, 5], [6], [7, 8]]
    assert collect(prepared(DataLoader(range(9), batch_sampler=varying))) == (list(range(9)), 5)


@in_processes(2, 3)
def test_repeats_that_nobody_sees_are_refused() -> None:
    """A divided sampler that may repeat samples unseen is an error at the first batch."""
    loader = prepared(DataLoader(range(7), batch_size=2, sampler=RankSampler(7)))
    for batch in loader:
        with pytest.raises(LoopError, match="RankSampler shares the samples"):
            gather_for_metrics(batch, loader)


def test_gathering_is_exact_on_one_process() -> None:
    """Without a process group, gathering returns the loader's own samples."""
    test_every_sharing.body("short")
    test_data_that_others_divide.body("short")
    test_batches_that_nobody_counts.body()
