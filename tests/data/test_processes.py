"""Loaders and exact gathering over real process groups."""

from __future__ import annotations

import random
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, WeightedRandomSampler

from zero_plugin.collectives import barrier, gather, gather_object
from zero_plugin.data.loader import ShardedLoader
from zero_plugin.data.metrics import gather_for_metrics
from zero_plugin.data.prepare import prepare_loader


class Stream(IterableDataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self):
        return iter(range(self.size))


class PythonShuffle(Sampler):
    """A user's sampler that draws from Python's generator, which nobody seeds alike on the processes."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self):
        return iter(random.sample(range(self.size), self.size))


class Buckets:
    """A batch sampler without a batch size, whose batches vary."""

    def __init__(self, size: int) -> None:
        self.batches: list[list[int]] = []
        taken = 0
        while taken < size:
            self.batches.append(list(range(taken, min(taken + 1 + taken % 4, size))))
            taken += len(self.batches[-1])

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)


def prepared(loader: DataLoader, **options) -> ShardedLoader:
    rank, world = dist.get_rank(), dist.get_world_size()
    return prepare_loader(loader, rank=rank, world_size=world, device=torch.device("cpu"), **options)


def collect(loader: ShardedLoader) -> list[int]:
    """An evaluation loop, as users write it; at the last batch also with nested tensors and with objects."""
    seen: list[int] = []
    for batch in loader:
        got = gather_for_metrics(batch, loader)
        seen += got.tolist()
        if loader.on_last_batch:
            nested = gather_for_metrics({"cubes": [batch**3], "rows": torch.stack([batch, batch], dim=1)}, loader)
            assert torch.equal(nested["cubes"][0], got**3)
            assert torch.equal(nested["rows"][:, 1], got)
            assert gather_for_metrics([f"{value}" for value in batch.tolist()], loader) == list(map(str, got.tolist()))
    return seen


def check_gathering_is_exact() -> None:
    world = dist.get_world_size()
    for samples in range(1, 41):
        data, expected = list(range(samples)), list(range(samples))
        for batch_size in (1, 3, 16) if samples <= 12 else (3, 16):
            assert collect(prepared(DataLoader(data, batch_size=batch_size))) == expected
        assert collect(prepared(DataLoader(data, batch_size=2 * world), split_batches=True)) == expected
        assert collect(prepared(DataLoader(Stream(samples), batch_size=3))) == expected
        assert collect(prepared(DataLoader(data, batch_sampler=Buckets(samples)))) == expected
        uneven = collect(prepared(DataLoader(data, batch_size=3), even_batches=False))
        assert uneven == expected[: len(uneven)]
        assert samples - len(uneven) <= 3 * (world - 1)
        uneven = collect(prepared(DataLoader(Stream(samples), batch_size=3), even_batches=False))
        assert uneven == expected[: len(uneven)]
        assert samples - len(uneven) <= 3 * (world - 1)
    ready = [torch.arange(n) + 10 * n for n in (1, 2, 3, 4, 5, 6, 7)]
    assert [collect_ready(prepared(DataLoader(ready, batch_size=None)))] == [torch.cat(ready).tolist()]


def collect_ready(loader: ShardedLoader) -> list[int]:
    return [value for batch in loader for value in gather_for_metrics(batch, loader).tolist()]


def check_worker_processes_keep_it_exact() -> None:
    for samples in (13, 16):
        assert collect(prepared(DataLoader(range(samples), batch_size=2, num_workers=2))) == list(range(samples))
        # Plain torch gives each worker the whole stream: the same is seen here, each time exactly once.
        seen = collect(prepared(DataLoader(Stream(samples), batch_size=2, num_workers=2)))
        assert sorted(seen) == sorted(2 * list(range(samples)))


def check_the_order_is_process_0_s() -> None:
    rank = dist.get_rank()
    samples = 3001  # beyond one broadcast of 1024 batches
    generator = torch.Generator().manual_seed(50 + rank)
    loaders = [
        DataLoader(range(samples), batch_size=1, shuffle=True),
        DataLoader(range(samples), batch_size=4, shuffle=True, generator=generator),
        DataLoader(range(samples), batch_size=4, sampler=PythonShuffle(samples)),
        DataLoader(range(samples), batch_sampler=BatchSampler(PythonShuffle(samples), 7, False)),
        DataLoader(range(samples), batch_size=4, sampler=WeightedRandomSampler([1.0] * samples, samples)),
    ]
    for index, loader in enumerate(loaders):
        sharded = prepared(loader)
        torch.manual_seed(100 + rank)  # as after set_seed(…, device_specific=True)
        random.seed(100 + rank)
        generator.manual_seed(50 + rank)
        epochs = [union(sharded) for _ in "ab"]
        assert epochs[0] != epochs[1], "reshuffled each epoch"
        torch.manual_seed(100)
        random.seed(100)
        generator.manual_seed(50)
        alone = [[value for batch in loader for value in batch.tolist()] for _ in "ab"]
        assert epochs == alone, f"loader {index}: what one process with process 0's random state sees"


def union(loader: ShardedLoader) -> list[int]:
    """What the processes see together in an epoch, step by step in the order of ranks, repeats left out."""
    steps = gather_object([[batch.tolist()[: loader.real_samples] for batch in loader]])
    return [value for step in zip(*steps, strict=True) for part in step for value in part]


class OwnStream(IterableDataset):
    """A stream that differs between the processes: rank 0 reads longest."""

    def __iter__(self):
        return iter(range(20 - 6 * dist.get_rank()))


def check_streams_of_different_length_stop_together() -> None:
    loader = prepared(DataLoader(OwnStream(), batch_size=2))
    flags = [loader.on_last_batch for _ in loader]
    assert flags == [False] * (len(flags) - 1) + [True]
    assert len(set(gather_object([len(flags)]))) == 1
    assert gather(torch.tensor(len(flags))).shape == (dist.get_world_size(),)


CHECKS = [
    check_gathering_is_exact,
    check_worker_processes_keep_it_exact,
    check_the_order_is_process_0_s,
    check_streams_of_different_length_stop_together,
]


@pytest.mark.processes
@pytest.mark.parametrize("world", [2, 3])
def test_loaders_over_real_processes(run_processes, world: int) -> None:
    """1 … 40 samples, any batch size and kind of loader: each once and in order; one order; no hang."""
    outputs = run_processes(__file__, world)
    assert "at least" in outputs[0]
    assert "left out" not in outputs[1]


if __name__ == "__main__":
    store, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for check in CHECKS:
        start = time.monotonic()
        check()
        print(f"{check.__name__}: {time.monotonic() - start:.1f} s")
    barrier()
    dist.destroy_process_group()
