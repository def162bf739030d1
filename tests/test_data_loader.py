"""Loaders that a script builds or prepares by hand, by Accelerate's names."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset

from zero_plugin import data_loader
from zero_plugin.data.active import GradientState
from zero_plugin.data_loader import (
    BatchSamplerShard,
    DataLoaderAdapter,
    DataLoaderDispatcher,
    DataLoaderShard,
    DataLoaderStateMixin,
    SeedableRandomSampler,
    SkipDataLoader,
    get_sampler,
    prepare_data_loader,
    skip_first_batches,
)
from zero_plugin.errors import LoopError

HALVES = [[8, 9, 10, 11], [12, 13, 14, 15]]


class Stream(IterableDataset):
    """The numbers 0 … 9, shuffled by the stream's own generator if it has one."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    def __iter__(self):
        if self.generator is None:
            return iter(range(10))
        return iter(torch.randperm(10, generator=self.generator).tolist())


class Mesh:
    def __init__(self, *names: str) -> None:
        self.mesh_dim_names = names


def values(loader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def flat(loader) -> list[int]:
    return [number for batch in loader for number in batch.tolist()]


def test_every_name_is_there() -> None:
    """All names of `accelerate.data_loader` exist."""
    names = """BatchSamplerShard DataLoaderAdapter DataLoaderDispatcher DataLoaderShard DataLoaderStateMixin
        IterableDatasetShard SeedableRandomSampler SkipBatchSampler SkipDataLoader get_sampler prepare_data_loader
        skip_first_batches"""
    assert all(hasattr(data_loader, name) for name in names.split())


@pytest.mark.parametrize("kind", [SkipDataLoader, DataLoaderShard, DataLoaderDispatcher])
def test_loaders_by_hand(kind) -> None:
    """They are DataLoaders, detect each epoch's last batch, and skip the first batches on request."""
    loader = kind(list(range(16)), batch_size=4)
    for base in (kind, DataLoader, DataLoaderAdapter, DataLoaderStateMixin):
        assert isinstance(loader, base)
    assert isinstance(loader.base_dataloader, DataLoader)
    for _ in range(2):
        assert [loader.end_of_dataloader for _ in loader] == [False, False, False, True]
    assert (len(loader), loader.total_batch_size) == (4, 4)
    later = kind(list(range(16)), skip_batches=2, batch_size=4)
    assert (values(later), len(later)) == (HALVES, 2)
    assert values(skip_first_batches(loader, num_batches=2)) == HALVES
    uneven = kind(range(6), batch_size=4)
    assert [uneven.remainder for _ in uneven][-1] == 2


def test_a_shard_by_hand_takes_a_shared_sampler() -> None:
    """It reads the processes from the sampler."""
    shard = BatchSamplerShard(BatchSampler(range(6), 2, False), 2, 1)
    loader = DataLoaderShard(range(6), batch_sampler=shard)
    assert (values(loader), loader.total_batch_size, loader.batch_size) == ([[2, 3], [0, 1]], 4, 2)


def test_skipping_before_preparing() -> None:
    """An unprepared loader skips too. A stream is read past the skipped items."""
    later = skip_first_batches(DataLoader(list(range(16)), batch_size=4), 2)
    assert values(later) == HALVES
    assert values(prepare_data_loader(later)) == HALVES
    assert values(skip_first_batches(DataLoader(Stream(), batch_size=4), 2)) == [[8, 9]]
    assert list(skip_first_batches(DataLoader(range(5), batch_size=None), 3)) == [3, 4]


def test_running_loops_show_in_the_gradient_state() -> None:
    """It shows the innermost loader, its end and its remainder, and none after a loop was left."""
    outer, inner = DataLoaderShard(range(7), batch_size=2), DataLoaderShard(range(4), batch_size=2)
    state = GradientState()
    for _ in outer:
        assert state.active_dataloader is outer
        assert (state.end_of_dataloader, state.remainder) == (outer.position == 3, 1)
        for _ in inner:
            assert (state.active_dataloader, state.remainder) == (inner, 0)
            break
    assert state.active_dataloader is None
    assert type(outer.gradient_state) is GradientState


def test_a_loader_of_the_user_s_own_takes_part() -> None:
    """`begin` and `end` around its loop make it the running one."""

    class Own(DataLoaderStateMixin):
        total_batch_size, total_dataset_length, drop_last = 4, 10, False

        def __iter__(self):
            self.begin()
            yield 1
            self.end_of_dataloader = True
            yield 2
            self.end()

    own = Own()
    assert (own.end_of_dataloader, own.remainder) == (False, -1)
    assert [(GradientState().active_dataloader is own, own.end_of_dataloader, own.remainder) for _ in own] == [
        (True, False, 2),
        (True, True, 2),
    ]
    assert GradientState().active_dataloader is None


def test_the_parts_of_all_processes() -> None:
    """Each process gets its part, in complete batches or in pieces."""
    loader = DataLoader(range(12), batch_size=4)
    parts = [values(prepare_data_loader(loader, num_processes=2, process_index=rank)) for rank in range(2)]
    assert parts == [[[0, 1, 2, 3], [8, 9, 10, 11]], [[4, 5, 6, 7], [0, 1, 2, 3]]]
    split = [
        values(prepare_data_loader(loader, num_processes=2, process_index=rank, split_batches=True))
        for rank in range(2)
    ]
    assert split == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]]


def test_the_user_s_sampler_is_found() -> None:
    """It is found behind the sharing sampler, also if it is no torch sampler."""

    class Own:
        def __init__(self, size: int, batch_size: int) -> None:
            self.size, self.batch_size = size, batch_size

        def __len__(self) -> int:
            return math.ceil(self.size / self.batch_size)

        def __iter__(self):
            yield from np.array_split(np.arange(self.size), len(self))

    own = Own(10, 4)
    loader = prepare_data_loader(DataLoader(range(10), batch_sampler=own), num_processes=2, process_index=0)
    assert loader.batch_sampler.batch_sampler is own
    assert [len(batch) for batch in loader] == [4, 4]
    shuffled = DataLoader(range(10), batch_size=2, shuffle=True)
    assert get_sampler(prepare_data_loader(shuffled)) is shuffled.sampler
    assert get_sampler(DataLoader(range(10), sampler=BatchSampler([3, 1], 2, False), batch_size=None)) == [3, 1]
    assert get_sampler(DataLoader(Stream(), batch_size=2)) is not shuffled.sampler


@pytest.mark.parametrize("as_sampler", [False, True])
def test_a_seedable_sampler_takes_the_place_of_torch_s(as_sampler: bool) -> None:
    """The order depends on seed and epoch, for any number of processes. The given loader is unchanged."""
    data = torch.arange(12)
    if as_sampler:
        batches = DataLoader(data, batch_size=2, shuffle=True).batch_sampler
        given = DataLoader(data, sampler=batches, batch_size=None)
    else:
        given = DataLoader(data, batch_size=2, shuffle=True)
    loader = prepare_data_loader(given, use_seedable_sampler=True, data_seed=5)
    assert type(get_sampler(loader)) is SeedableRandomSampler
    assert type(get_sampler(given)) is not SeedableRandomSampler
    torch.manual_seed(1)
    epochs = [flat(loader) for _ in range(3)]
    torch.manual_seed(2)
    loader.set_epoch(1)
    assert [flat(loader) for _ in range(2)] == epochs[1:]
    two = [
        values(prepare_data_loader(given, None, 2, rank, use_seedable_sampler=True, data_seed=5)) for rank in range(2)
    ]
    assert [n for step in zip(*two, strict=True) for part in step for n in part] == epochs[0]
    other = prepare_data_loader(given, use_seedable_sampler=True, data_seed=6)
    assert flat(other) != epochs[0]


def test_where_batches_go() -> None:
    """`put_on_device` moves them. Otherwise they stay on the loader's device."""
    loader, meta = DataLoader(TensorDataset(torch.ones(2)), batch_size=2), torch.device("meta")
    assert [batch[0].device.type for batch in prepare_data_loader(loader, meta, put_on_device=True)] == ["meta"]
    assert [batch[0].device.type for batch in prepare_data_loader(loader, meta)] == ["cpu"]


def test_ready_batches_of_a_stream_stay_tensors() -> None:
    """`batch_size=None` passes on samples one by one."""
    assert [type(sample) for sample in prepare_data_loader(DataLoader(Stream(), batch_size=None))] == [int] * 10


def test_a_mesh_of_more_than_data_parallelism_is_refused() -> None:
    """Processes that need equal batches would get different ones."""
    loader = DataLoader(range(4))
    assert len(prepare_data_loader(loader, torch_device_mesh=Mesh("dp_replicate", "dp_shard"))) == 4
    with pytest.raises(LoopError, match="the dimensions cp, tp"):
        prepare_data_loader(loader, torch_device_mesh=Mesh("dp", "tp", "cp"))
    with pytest.raises(LoopError, match="torch_device_mesh"):
        DataLoaderDispatcher(range(4), torch_device_mesh=Mesh("tp"))
