"""Turn a DataLoader into one that gives this process its part."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from enum import Enum
from typing import Any, Literal

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from zero_plugin.announce import announce
from zero_plugin.collectives import gather_object, num_processes
from zero_plugin.data.adapter import DataLoaderAdapter, copy_loader
from zero_plugin.data.batch_sampler import BatchSamplerShard
from zero_plugin.data.batches import Sharing
from zero_plugin.data.cutting import cut_batches
from zero_plugin.data.delivery import Delivery
from zero_plugin.data.dispatch import DataLoaderDispatcher, SliceFunction
from zero_plugin.data.dividing import (
    can_be_asked_for_its_shard,
    count_real_samples,
    divides_itself,
    find_dividing_sampler,
)
from zero_plugin.data.loader import DataLoaderShard
from zero_plugin.data.reports import DropReport
from zero_plugin.data.samplers import SeedableRandomSampler
from zero_plugin.data.skip import SkipDataLoader
from zero_plugin.data.stream import CountingCollate, Division, StreamShard
from zero_plugin.data.worker import WorkerStart
from zero_plugin.errors import ConfigError, LoopError, Problem

__all__ = ["ShardIterable", "prepare_loader"]

ShardIterable = Literal["auto", "never"]


def prepare_loader(
    loader: Any,
    *,
    rank: int,
    world_size: int,
    device: torch.device | None,
    even_batches: bool = True,
    split_batches: bool = False,
    shard_iterable: ShardIterable = "auto",
    dispatch_batches: bool | None = None,
    slice_fn: SliceFunction | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    rng_types: Iterable[str | Enum] = (),
    cut: int = 1,
) -> DataLoaderAdapter:
    """The loader's part for process `rank` of `world_size`; the given loader stays as it is. Collective.

    A map-style data set is shared by indices, unless a sampler with `num_replicas` and `rank`, as torch's
    DistributedSampler, gives each process its own already. An iterable data set divides itself (WebDataset, torchdata,
    LitData, MosaicML Streaming, a split `datasets` stream), or is asked for its `shard(num_shards, index)`, or is read
    as a whole by each process and worker, which keeps its own part. A loader that is prepared already is returned as it
    is.

    Args:
        loader: a DataLoader over a map-style or an iterable data set, of a subclass too.
        rank: this process.
        world_size: processes that share the data; they are the default process group.
        device: where the batches go; None leaves them where the loader makes them.
        even_batches: complete the last step with the epoch's first samples, so that every process has a full batch;
            where the data set divides itself, a process that has read its part begins it again. False: all processes
            stop at the shortest, and the number of samples left out is logged once.
        split_batches: the loader's batch size is that of all processes together.
        shard_iterable: `never` takes an iterable data set to give each process and worker its own samples.
        dispatch_batches: process 0 reads for all, and sends the others their parts.
        slice_fn: what divides the batches then, see `DataLoaderDispatcher`.
        use_seedable_sampler: shuffle by `SeedableRandomSampler`, where torch's RandomSampler would.
        data_seed: its seed; None takes torch's current one.
        non_blocking: do not wait for batches to be copied to the device.
        rng_types: random states that every process gets from process 0 at the start of each epoch. A sampler's own
            generator needs none: the order is process 0's.
        cut: each of the loader's batches comes as so many smaller ones.

    Raises:
        LoopError: no DataLoader, or one that gives batches out of order, a sampler or a data set that is another one
            than the other processes', or one that trains and cannot be `cut`.
        ConfigError: `split_batches` without a batch size that `world_size` divides.
    """
    if shard_iterable not in ("auto", "never"):
        raise LoopError(f"shard_iterable={shard_iterable!r}: write 'auto' or 'never'.")
    if isinstance(loader, DataLoaderShard | DataLoaderDispatcher):
        return loader
    _check_loader(loader, world_size)
    if use_seedable_sampler:
        loader = _seed_sampler(loader, data_seed)
    whole, loader = loader, cut_batches(loader, cut, split_among=world_size if split_batches else 1)
    stream = isinstance(loader.dataset, IterableDataset)
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    batched = loader.batch_sampler is not None or isinstance(loader.sampler, BatchSampler)
    batch_size = getattr(sampler, "batch_size", None) if batched else 1
    dividing = None if stream or world_size == 1 else find_dividing_sampler(loader, rank, world_size)
    how = Sharing(
        rank=rank,
        world=world_size,
        batch_size=_split_size(batch_size if batched and not dividing else None, world_size)
        if split_batches
        else batch_size,
        even=even_batches and world_size > 1,
        split=split_batches,
        drop_last=getattr(sampler, "drop_last", False),
        batched=batched,
        cut=1 if loader is whole else cut,
    )
    delivery = Delivery(device, non_blocking, tuple(rng_types), _generator_of(loader.dataset) if stream else None)
    if dispatch_batches:
        alone = replace(how, rank=0, world=1, even=False, split=False, batch_size=batch_size)
        base, _ = _give_part(loader, alone, None, shard_iterable)
        return DataLoaderDispatcher.sharing(base, how, delivery, slice_fn)
    if not stream:
        _check_same_length(loader.dataset)
    base, repeats_unseen = _give_part(loader, how, dividing, shard_iterable)
    return DataLoaderShard.sharing(
        base, how, delivery, ends_unknown=stream or repeats_unseen is not None, repeats_unseen=repeats_unseen
    )


def _give_part(
    loader: DataLoader[Any], how: Sharing, dividing: Any, shard_iterable: ShardIterable
) -> tuple[DataLoader[Any], str | None]:
    """A loader that reads its part of the data, and the name of the sampler that may repeat samples unseen."""
    repeats_unseen = None
    stream = isinstance(loader.dataset, IterableDataset)
    if stream:
        replaced = _share_stream(loader, how, shard_iterable)
    else:
        real = None
        if dividing is not None:
            try:
                real = count_real_samples(loader, dividing)
            except TypeError:
                repeats_unseen = type(dividing).__name__
        rank, world = (how.rank, how.world) if dividing is None else (0, 1)
        key = "sampler" if loader.batch_sampler is None else "batch_sampler"
        replaced = {
            key: BatchSamplerShard(
                getattr(loader, key),
                world,
                rank,
                how.split,
                how.even and world > 1,
                report_dropped=DropReport(how, is_least=dividing is not None),
                real=real,
                batched=how.batched,
            )
        }
    if loader.num_workers and (how.rank or (stream and loader.worker_init_fn is not None)):
        replaced["worker_init_fn"] = WorkerStart(how.rank, loader.worker_init_fn, stream=stream)
    return copy_loader(loader, **replaced), repeats_unseen


def _seed_sampler(loader: DataLoader[Any], data_seed: int | None) -> DataLoader[Any]:
    """The loader with a SeedableRandomSampler in place of torch's RandomSampler; as it is where there is none."""
    batches = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    sampler = loader.sampler if batches is None else getattr(batches, "sampler", None)
    if not isinstance(sampler, RandomSampler) or isinstance(sampler, SeedableRandomSampler):
        return loader
    seedable = SeedableRandomSampler(
        sampler.data_source,
        sampler.replacement,
        sampler._num_samples,  # what was asked for: the data set may grow
        data_seed=data_seed,
    )
    if batches is None:
        return copy_loader(loader, sampler=seedable)
    seeded: Any = copy.copy(batches)
    seeded.sampler = seedable
    if batches is loader.sampler:
        return copy_loader(loader, sampler=seeded)
    return copy_loader(loader, batch_sampler=seeded, sampler=seedable)


def _generator_of(dataset: Any) -> torch.Generator | None:
    """The generator that a stream draws from, where it shows one."""
    generator = getattr(dataset, "generator", None)
    return generator if isinstance(generator, torch.Generator) else None


def _share_stream(loader: DataLoader[Any], how: Sharing, shard_iterable: ShardIterable) -> dict[str, Any]:
    """What replaces the loader's attributes."""
    dataset: Any = loader.dataset
    if shard_iterable == "never" or divides_itself(dataset):
        division = Division.BY_ITSELF
    elif how.world > 1 and can_be_asked_for_its_shard(dataset, how.world):
        division = Division.BY_SHARD_METHOD
    else:
        division = Division.BY_SKIPPING
    if division is Division.BY_SKIPPING and how.rank == 0 and (how.world > 1 or loader.num_workers > 1):
        announce(
            f"{type(dataset).__name__}: each of {how.world} processes with {max(1, loader.num_workers)} loader workers "
            "reads all of the data and keeps its part; if the data set gives each process and worker its own samples, "
            "write Accelerator(shard_iterable='never')"
        )
    batched = loader.batch_sampler is not None
    replaced: dict[str, Any] = {
        "dataset": StreamShard(dataset, how, division, lasting_workers=loader.persistent_workers),
        "collate_fn": CountingCollate(loader.collate_fn, batched),
    }
    if batched:
        assert how.batch_size is not None, "a DataLoader over a stream batches by a number only"
        replaced["batch_sampler"] = BatchSampler(loader.sampler, how.batch_size, loader.drop_last)
    return replaced


def _check_loader(loader: Any, world_size: int) -> None:
    if isinstance(loader, SkipDataLoader):
        raise LoopError("prepare: the loader skips batches already; prepare the whole one, then skip_first_batches")
    if not isinstance(loader, DataLoader):
        raise LoopError(f"prepare: found a {type(loader).__name__}; give a torch.utils.data.DataLoader")
    if world_size > 1 and not loader.in_order:
        raise LoopError(
            "prepare: in_order=False lets the processes' batches drift apart; build the loader with in_order=True"
        )


def _check_same_length(dataset: Any) -> None:
    """A data set that was cut up by hand before would be shared twice, and its processes would end at other steps."""
    if num_processes() == 1:
        return
    lengths = gather_object([len(dataset) if hasattr(dataset, "__len__") else None])
    if len(set(lengths)) > 1:
        raise LoopError(
            f"prepare: the processes' data sets hold {', '.join(map(str, lengths))} samples; prepare() shares one data "
            "set among the processes, so give each of them the whole one"
        )


def _split_size(batch_size: int | None, world_size: int) -> int:
    if batch_size is None or batch_size % world_size:
        found = "has no batch size of all processes" if batch_size is None else f"has batch_size={batch_size}"
        raise ConfigError(
            [
                Problem(
                    where="prepare(DataLoader)",
                    key="split_batches",
                    message=f"the loader {found}, which cannot be split among {world_size} processes",
                    fix=f"give it a batch_size that is a multiple of {world_size}, or write split_batches: false",
                )
            ]
        )
    return batch_size // world_size
