"""Turn a DataLoader into one that gives this process its part."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from zero_plugin.collectives import gather_object, num_processes
from zero_plugin.data.batches import BatchShard, Sharing
from zero_plugin.data.dividing import (
    can_be_asked_for_its_shard,
    count_real_samples,
    divides_itself,
    find_dividing_sampler,
)
from zero_plugin.data.loader import ActiveLoaders, ShardedLoader
from zero_plugin.data.stream import CountingCollate, Division, StreamShard
from zero_plugin.data.worker import WorkerStart
from zero_plugin.errors import ConfigError, LoopError, Problem

__all__ = ["ShardIterable", "prepare_loader"]

ShardIterable = Literal["auto", "never"]

_logger = logging.getLogger(__name__)


def prepare_loader(
    loader: Any,
    *,
    rank: int,
    world_size: int,
    device: torch.device | None,
    even_batches: bool = True,
    split_batches: bool = False,
    shard_iterable: ShardIterable = "auto",
    active: ActiveLoaders | None = None,
) -> ShardedLoader:
    """The loader's part for process `rank` of `world_size`; the given loader stays as it is. Collective.

    A map-style data set is shared by indices, unless a sampler with `num_replicas` and `rank`, as torch's
    DistributedSampler, gives each process its own already. An iterable data set divides itself (WebDataset, torchdata,
    LitData, MosaicML Streaming, a split `datasets` stream), or is asked for its `shard(num_shards, index)`, or is read
    as a whole by each process and worker, which keeps its own part.

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
        active: where the loader enters while a loop over it runs.

    Raises:
        LoopError: no DataLoader, one that is prepared already or gives batches out of order, a sampler or a data set
            that is another one than the other processes'.
        ConfigError: `split_batches` without a batch size that `world_size` divides.
    """
    if shard_iterable not in ("auto", "never"):
        raise LoopError(f"shard_iterable={shard_iterable!r}: write 'auto' or 'never'.")
    _check_loader(loader, world_size)
    stream = isinstance(loader.dataset, IterableDataset)
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    batched = loader.batch_sampler is not None or isinstance(loader.sampler, BatchSampler)
    batch_size = getattr(sampler, "batch_size", None) if batched else 1
    dividing = None if stream or world_size == 1 else find_dividing_sampler(loader, rank, world_size)
    if split_batches:
        batch_size = _split_size(batch_size if batched and dividing is None else None, world_size)
    how = Sharing(
        rank=rank,
        world=world_size,
        batch_size=batch_size,
        even=even_batches and world_size > 1,
        split=split_batches,
        drop_last=getattr(sampler, "drop_last", False),
        batched=batched,
    )
    report_dropped = _drop_reporter(how, "at least " if stream or dividing is not None else "")
    repeats_unseen = None
    if stream:
        replaced = _share_stream(loader, how, shard_iterable)
    else:
        _check_same_length(loader.dataset)
        key = "sampler" if loader.batch_sampler is None else "batch_sampler"
        real = None
        if dividing is not None:
            try:
                real = count_real_samples(loader, dividing)
            except TypeError:
                repeats_unseen = type(dividing).__name__
        taken = how if dividing is None else replace(how, rank=0, world=1)
        replaced = {key: BatchShard(sampler, taken, report_dropped, real)}
    if loader.num_workers and (rank or (stream and loader.worker_init_fn is not None)):
        replaced["worker_init_fn"] = WorkerStart(rank, loader.worker_init_fn, stream=stream)
    inner = copy.copy(loader)  # keeps the subclass and every argument, in any version of torch
    inner.__dict__.update(replaced, _iterator=None)  # attribute assignment is forbidden once a DataLoader is built
    return ShardedLoader(
        inner,
        how,
        device=device,
        active=ActiveLoaders() if active is None else active,
        report_dropped=report_dropped,
        report_restart=_restart_reporter(),
        ends_unknown=stream or repeats_unseen is not None,
        repeats_unseen=repeats_unseen,
    )


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
        _logger.warning(
            "%s: each of %d processes with %d loader workers reads all of the data and keeps its part; if the data set "
            "gives each process and worker its own samples, write Accelerator(shard_iterable='never')",
            type(dataset).__name__,
            how.world,
            max(1, loader.num_workers),
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
    if isinstance(loader, ShardedLoader):
        raise LoopError("prepare: the loader is prepared already; prepare each loader once")
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


def _drop_reporter(how: Sharing, at_least: str) -> Callable[[int], None]:
    told = False

    def report_dropped(samples: int) -> None:
        nonlocal told
        if not told and how.rank == 0:
            told = True
            _logger.warning(
                "%s left out: %s%d at the end of each epoch, so that all %d processes stop together; "
                "even_batches: true repeats samples instead",
                "samples" if how.batched else "batches",
                at_least,
                samples,
                how.world,
            )

    return report_dropped


def _restart_reporter() -> Callable[[int], None]:
    told = False

    def report_restart(steps: int) -> None:
        nonlocal told
        if not told:
            told = True
            _logger.warning(
                "this process's part of the data ended after %d batches, before another's; it begins again, and "
                "gather_for_metrics leaves the repeats out. even_batches: false stops all at the shortest",
                steps,
            )

    return report_restart
