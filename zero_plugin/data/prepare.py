"""Turn a DataLoader into one that yields this process's part, in smaller batches if memory ran out before."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, Final

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler

from zero_plugin.data.batch_sampler import (
    BatchSamplerShard,
    batches_of,
    copy_loader,
    cut_batches,
    with_batches,
)
from zero_plugin.data.dispatch import DataLoaderDispatcher, SliceFunction
from zero_plugin.data.loader import DataLoaderAdapter, DataLoaderShard, Delivery, DropReport, SkipDataLoader
from zero_plugin.data.sharing import SeedableRandomSampler, Sharing
from zero_plugin.data.stream import ShardIterable, WorkerStart, share_stream
from zero_plugin.distributed.collectives import gather_values, num_processes, process_index
from zero_plugin.distributed.seeding import generator_of, undisturbed
from zero_plugin.errors import ConfigError, LoopError, Problem


def prepare_loader(
    loader: Any,
    *,
    rank: int,
    world_size: int,
    shared_by: int = 1,
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
    """Return a loader of the part of process `rank` of `world_size`; the given loader is not changed. Collective.

    A map-style dataset is shared by indices, unless a sampler with `num_replicas` and `rank`, like torch's
    DistributedSampler, already divides the data. An iterable dataset divides itself (WebDataset, torchdata, LitData,
    MosaicML Streaming, a split `datasets` stream), or by its method `shard(num_shards, index)`. Any other iterable
    dataset is read completely by each process and worker, which keeps its own part. A prepared loader is returned.

    Args:
        loader: a DataLoader, or an instance of a subclass, over a map-style or an iterable dataset.
        rank: this process, or its group of processes that have the same samples.
        world_size: processes, or groups, that share the data; together they are the default process group.
        shared_by: how many processes have the same samples; see `sequence_parallel_size`.
        device: the device of the batches; None leaves them where the loader makes them.
        even_batches: complete the last step with the epoch's first samples: every process has a full batch. If the
            dataset divides itself, a process that has read its part begins it again. False: all processes stop with the
            shortest part, and the number of samples left out is logged once.
        split_batches: the loader's batch size counts the samples of all processes together.
        shard_iterable: `never` assumes that an iterable dataset gives each process and worker its own samples.
        dispatch_batches: process 0 reads for all, and sends the others their parts.
        slice_fn: divides the batches under `dispatch_batches`, see `DataLoaderDispatcher`.
        use_seedable_sampler: shuffle by `SeedableRandomSampler` instead of torch's RandomSampler.
        data_seed: its seed; None takes torch's current one.
        non_blocking: do not wait for batches to be copied to the device.
        rng_types: random states that every process gets from process 0 at the start of each epoch. A sampler's own
            generator is not needed here: the order is always process 0's.
        cut: the number of smaller batches that each of the loader's batches is cut into.

    Raises:
        LoopError: `loader` is no DataLoader or gives batches out of order; its sampler or dataset differs from the
            other processes'; or it is for training and its batches cannot be `cut`.
        ConfigError: `split_batches` is set, and `world_size` does not divide the batch size.
    """
    if isinstance(loader, DataLoaderShard | DataLoaderDispatcher):
        return loader
    _check_loader(loader, world_size * shared_by, shard_iterable)
    if use_seedable_sampler:
        loader = _seed_sampler(loader, data_seed)
    uncut, loader = loader, cut_batches(loader, cut, split_among=world_size if split_batches else 1)
    stream = isinstance(loader.dataset, IterableDataset)
    batches = batches_of(loader)
    batched = batches is not None
    batch_size = getattr(batches, "batch_size", None) if batched else 1
    dividing = None if stream or world_size * shared_by == 1 else find_dividing_sampler(loader, rank, world_size)
    of_all = batch_size if batched and not dividing else None
    sharing = Sharing(
        rank=rank,
        world=world_size,
        batch_size=_split_size(of_all, world_size) if split_batches else batch_size,
        even=even_batches and world_size > 1,
        split=split_batches,
        drop_last=getattr(batches if batched else loader.sampler, "drop_last", False),
        batched=batched,
        cut=1 if loader is uncut else cut,
        shared_by=shared_by,
        is_counted=shared_by == 1 or process_index() % shared_by == 0,
    )
    delivery = Delivery(device, non_blocking, tuple(rng_types), generator_of(loader.dataset) if stream else None)
    if dispatch_batches:
        _refuse_shared_dispatch(shared_by)
        alone = replace(sharing, rank=0, world=1, even=False, split=False, batch_size=batch_size)
        base = _give_part(loader, alone, shard_iterable)
        return DataLoaderDispatcher.around(base, sharing, delivery, slice_fn=slice_fn)
    if not stream:
        _check_same_length(loader.dataset)
    real = None if dividing is None else count_real_samples(loader, dividing)
    repeats_unseen = None if dividing is None or real is not None else type(dividing).__name__
    return DataLoaderShard.around(
        _give_part(loader, sharing, shard_iterable, is_divided=dividing is not None, real=real),
        sharing,
        delivery,
        ends_unknown=stream or repeats_unseen is not None,
        repeats_unseen=repeats_unseen,
    )


def _give_part(
    loader: DataLoader[Any],
    sharing: Sharing,
    shard_iterable: ShardIterable,
    *,
    is_divided: bool = False,
    real: int | None = None,
) -> DataLoader[Any]:
    """Return a loader that reads this process's part of the data.

    Args:
        loader: reads all data.
        sharing: how the data is shared.
        shard_iterable: see `prepare_loader`.
        is_divided: the loader's sampler already gives this process its own part.
        real: how many of that part's samples, from the front, are not repeated ones; None for all.
    """
    stream = isinstance(loader.dataset, IterableDataset)
    if stream:
        part = share_stream(loader, sharing, shard_iterable)
    else:
        rank, world = (0, 1) if is_divided else (sharing.rank, sharing.world)
        shard = BatchSamplerShard(
            loader.sampler if loader.batch_sampler is None else loader.batch_sampler,
            world,
            rank,
            sharing.split,
            sharing.even and world > 1,
            report_dropped=DropReport(sharing, is_divided),
            real=real,
            batched=sharing.batched,
            shared_by=1 if is_divided else sharing.shared_by,
        )
        part = with_batches(loader, shard)
    if loader.num_workers and (sharing.rank or (stream and loader.worker_init_fn is not None)):
        part = copy_loader(part, worker_init_fn=WorkerStart(sharing.rank, loader.worker_init_fn, stream=stream))
    return part


def _check_loader(loader: Any, processes: int, shard_iterable: str) -> None:
    if shard_iterable not in ("auto", "never"):
        raise LoopError(f"shard_iterable={shard_iterable!r}: write 'auto' or 'never'.")
    if isinstance(loader, SkipDataLoader):
        raise LoopError(
            "prepare: the loader already skips batches. Prepare the original loader, then call skip_first_batches."
        )
    if not isinstance(loader, DataLoader):
        raise LoopError(f"prepare: found a {type(loader).__name__}; give a torch.utils.data.DataLoader")
    if processes > 1 and not loader.in_order:
        raise LoopError(
            "prepare: with in_order=False the processes' batches would not match. Build the loader with in_order=True."
        )


def _refuse_shared_dispatch(shared_by: int) -> None:
    if shared_by > 1:
        message = "true, but the processes of sequence_parallel_size have the same samples"
        fix = "Write dispatch_batches=None: each process reads its own samples."
        raise ConfigError([Problem("prepare(DataLoader)", "dispatch_batches", message, fix)])


def _check_same_length(dataset: Any) -> None:
    """Refuse datasets of different lengths: one that the script has already divided would be divided twice."""
    if num_processes() == 1:
        return
    lengths = gather_values(len(dataset) if hasattr(dataset, "__len__") else None)
    if len(set(lengths)) > 1:
        raise LoopError(
            f"prepare: the processes' datasets hold {', '.join(map(str, lengths))} samples. prepare() shares one "
            "dataset among the processes: give each process the complete dataset."
        )


def _split_size(batch_size: int | None, world_size: int) -> int:
    if batch_size is None or batch_size % world_size:
        found = "has no batch size of all processes" if batch_size is None else f"has batch_size={batch_size}"
        message = f"the loader {found}, which cannot be split among {world_size} processes"
        fix = f"give it a batch_size that is a multiple of {world_size}, or write split_batches: false"
        raise ConfigError([Problem("prepare(DataLoader)", "split_batches", message, fix)])
    return batch_size // world_size


def _seed_sampler(loader: DataLoader[Any], data_seed: int | None) -> DataLoader[Any]:
    """Return the loader with a SeedableRandomSampler instead of torch's RandomSampler; itself if it has none."""
    batches = batches_of(loader)
    sampler = loader.sampler if batches is None else getattr(batches, "sampler", None)
    if not isinstance(sampler, RandomSampler) or type(sampler).__iter__ is not RandomSampler.__iter__:
        return loader  # a subclass with its own `__iter__` draws in its own way
    seedable = SeedableRandomSampler(
        sampler.data_source,
        sampler.replacement,
        sampler._num_samples,  # the argument, or None: `num_samples` would fix the length of a dataset that grows
        data_seed=data_seed,
    )
    if batches is None:
        return copy_loader(loader, sampler=seedable)
    seeded = copy.copy(batches)
    seeded.sampler = seedable
    return with_batches(loader, seeded, sampler=seedable)


def find_dividing_sampler(loader: DataLoader[Any], rank: int, world: int) -> Any:
    """Find a sampler or batch sampler that already selects this process's samples, like `DistributedSampler`.

    Returns:
        The sampler, or None.

    Raises:
        LoopError: its `num_replicas` or `rank` differ from those of the process group.
    """
    for sampler in (loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None), loader.sampler):
        parts, part = getattr(sampler, "num_replicas", None), getattr(sampler, "rank", None)
        if not isinstance(parts, int) or not isinstance(part, int) or parts == 1:
            continue
        if (parts, part) != (world, rank):
            raise LoopError(
                f"prepare: the loader's {type(sampler).__name__} takes part {part} of {parts}, but this is process "
                f"{rank} of {world}. Create it without num_replicas and rank, or remove it: prepare() shards the data."
            )
        return sampler
    return None


def count_real_samples(loader: DataLoader[Any], sampler: Any) -> int | None:
    """Return how many of the sampler's samples, from the front, are not repeated to make all processes even.

    None if unknown: the number is only known for torch's own DistributedSampler in its own order.
    """
    if type(sampler) is not DistributedSampler or type(loader.batch_sampler) not in (BatchSampler, type(None)):
        return None
    # Process r gets numbers r, r + world, … of the dataset's permutation, repeated from its beginning.
    unrepeated = -(-(len(sampler.dataset) - sampler.rank) // sampler.num_replicas)  # type: ignore[arg-type]
    return min(sampler.num_samples, max(0, unrepeated))


_SAMPLES: Final = 8  # spread over the dataset: if batches are padded, the longest of them counts


def peek_batch(loaders: Sequence[DataLoader[Any]]) -> Any:
    """Collate some samples of the training loader's dataset into an example batch; None if that is not possible.

    No iterator is created, no sampler is used, and the states of random generators are restored afterwards. A stream
    gives None, because the loop would miss the samples.

    Args:
        loaders: the first that shuffles is the training loader; if none shuffles, the first.
    """
    if not loaders:
        return None
    loader = next((one for one in loaders if isinstance(getattr(one, "sampler", None), RandomSampler)), loaders[0])
    data: Any = loader.dataset
    if isinstance(data, IterableDataset):
        return None
    try:
        size = len(data)
        indices = sorted({step * (size - 1) // (_SAMPLES - 1) for step in range(_SAMPLES)}) if size else []
        with undisturbed():
            if loader.batch_sampler is None:  # the sampler yields batches, not indices
                return loader.collate_fn(data[indices])
            return loader.collate_fn([data[index] for index in indices])
    except Exception:  # noqa: BLE001 - the user's code; the dataset may have other keys. The loop will show real errors
        return None
