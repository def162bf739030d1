"""Exact gathering: every number of samples, batch size, way of sharing and kind of value, over real processes."""

from __future__ import annotations

import sys
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from zero_plugin.data.batches import gather_for_metrics
from zero_plugin.data.loader import DataLoaderShard
from zero_plugin.data.prepare import prepare_loader
from zero_plugin.distributed.collectives import num_processes, process_index
from zero_plugin.errors import LoopError

SIZES = {"short": ((2, 7, 12), (1, 3)), "full": (range(1, 41), range(1, 10))}


class Stream(IterableDataset):
    """0 … size-1, the same on every process."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self):
        return iter(range(self.size))


class Sharded(Stream):
    """A stream that can be asked for its shard, the first of which are longer."""

    numbers = None

    def shard(self, num_shards: int, index: int) -> Sharded:
        part = Sharded(self.size)
        part.numbers = range(index, self.size, num_shards)
        return part

    def __iter__(self):
        return iter(range(self.size) if self.numbers is None else self.numbers)


class DividedByRank(Stream):
    """Gives each process a part of its own, of a different length."""

    def __iter__(self):
        return iter(range(process_index(), self.size, num_processes()))


class RankSampler:
    """Somebody's sampler for several processes."""

    def __init__(self, size: int) -> None:
        self.num_replicas, self.rank, self.size = num_processes(), process_index(), size

    def __iter__(self):
        return iter(range(self.rank, self.size, self.num_replicas))


def prepared(loader: DataLoader, **options) -> DataLoaderShard:
    return prepare_loader(loader, rank=process_index(), world_size=num_processes(), device=None, **options)


def collect(loader: DataLoaderShard) -> tuple[list[int], int]:
    """What an evaluation loop gets: the samples, checked as tensors, nested, and objects; and values per batch."""
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
    """How many of the first samples are seen, with `batch` samples per process and step."""
    world = num_processes()
    full, tail = divmod(samples, batch * world)
    if drop_last or not (even or tail > batch * (world - 1)):
        tail = 0
    return full * batch * world + tail


def check_every_sharing(samples: int, batch: int) -> None:
    """Map-style data and a stream, alike: the data set in order, once each, or as much of it as was asked for."""
    for even, drop_last, split in product((True, False), repeat=3):
        expected = list(range(kept(samples, batch, even=even, drop_last=drop_last)))
        for data in (range(samples), Stream(samples)):
            loader = DataLoader(data, batch_size=batch * (num_processes() if split else 1), drop_last=drop_last)
            found = collect(prepared(loader, even_batches=even, split_batches=split))
            assert found == (expected, -(-len(expected) // batch)), (samples, batch, even, drop_last, split, data)


def check_divided_by_others(samples: int, batch: int) -> None:
    """A DistributedSampler, a `shard` method, a stream divided by rank: each sample once, though parts differ."""
    sampler = DistributedSampler(range(samples), num_processes(), process_index(), shuffle=False)
    by_sampler = DataLoader(range(samples), batch_size=batch, sampler=sampler)
    by_method = prepared(DataLoader(Sharded(samples), batch_size=batch))
    by_rank = prepared(DataLoader(DividedByRank(samples), batch_size=batch), shard_iterable="never")
    for loader in (prepared(by_sampler), by_method, by_rank):
        if samples >= num_processes():  # without any sample a process has nothing to go on with
            found, _ = collect(loader)
            assert sorted(found) == list(range(samples)), (samples, batch, loader.dataset)


def check_uncounted() -> None:
    """Batches that the data set or a batch sampler makes: dealt out whole, repeated ones left out."""
    ready = [torch.arange(n) + 10 * n for n in (1, 2, 3, 4, 5, 6, 7)]
    assert collect(prepared(DataLoader(ready, batch_size=None))) == (torch.cat(ready).tolist(), 7)
    varying = [[0], [1, 2], [3, 4, 5], [6], [7, 8]]
    assert collect(prepared(DataLoader(range(9), batch_sampler=varying))) == (list(range(9)), 5)


def check_refusal_of_unseen_repeats() -> None:
    """A sampler of unknown habits that gives each process its part may repeat samples: an error, at the first batch."""
    if num_processes() == 1:
        return
    loader = prepared(DataLoader(range(7), batch_size=2, sampler=RankSampler(7)))
    for batch in loader:
        with pytest.raises(LoopError, match="RankSampler shares the samples"):
            gather_for_metrics(batch, loader)


def run_checks(extent: str) -> None:
    sizes, batches = SIZES[extent]
    for samples, batch in product(sizes, batches):
        check_every_sharing(samples, batch)
    for samples, batch in product(sizes, batches[:2]):
        check_divided_by_others(samples, batch)
    check_uncounted()
    check_refusal_of_unseen_repeats()


def test_gathering_is_exact_on_one_process() -> None:
    """Without other processes it is the loader's own samples."""
    run_checks("short")


@pytest.mark.processes
@pytest.mark.parametrize("world", [2, 3])
def test_gathering_is_exact(run_processes, world: int) -> None:
    """A few numbers of samples, two batch sizes, every way of sharing."""
    run_processes(__file__, world, "short")


@pytest.mark.campaign
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_gathering_is_exact_for_every_size(run_processes, world: int) -> None:
    """1 … 40 samples, batch sizes 1 … 9, every way of sharing."""
    run_processes(__file__, world, "full", seconds=2500)


if __name__ == "__main__":
    store, rank, world, extent = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    run_checks(extent)
    dist.barrier()
    dist.destroy_process_group()
