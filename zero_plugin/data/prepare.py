"""Turn a DataLoader into one that gives this process its part."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from zero_plugin.data.batches import BatchShard, Sharing
from zero_plugin.data.loader import ActiveLoaders, ShardedLoader
from zero_plugin.data.stream import CountingCollate, StreamShard
from zero_plugin.errors import ConfigError, LoopError, Problem

__all__ = ["prepare_loader"]

_logger = logging.getLogger(__name__)


def prepare_loader(
    loader: Any,
    *,
    rank: int,
    world_size: int,
    device: torch.device | None,
    even_batches: bool = True,
    split_batches: bool = False,
    active: ActiveLoaders | None = None,
) -> ShardedLoader:
    """The loader's part for process `rank` of `world_size`; the given loader stays as it is.

    Args:
        loader: a DataLoader over a map-style or an iterable data set, of a subclass too.
        rank: this process.
        world_size: processes that share the data; they are the default process group.
        device: where the batches go; None leaves them where the loader makes them.
        even_batches: complete the last step with the epoch's first samples, so that every process has a full batch.
            False: all processes stop at the shortest, and the number of samples left out is logged once.
        split_batches: the loader's batch size is that of all processes together.
        active: where the loader enters while a loop over it runs.

    Raises:
        LoopError: no DataLoader, one that is prepared or shared already, or one that gives batches out of order.
        ConfigError: `split_batches` without a batch size that `world_size` divides.
    """
    _check_loader(loader, world_size)
    stream = isinstance(loader.dataset, IterableDataset)
    sampler_key = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = getattr(loader, sampler_key)
    batched = loader.batch_sampler is not None or isinstance(loader.sampler, BatchSampler)
    batch_size = getattr(sampler, "batch_size", None) if batched else 1
    if split_batches:
        batch_size = _split_size(batch_size if batched else None, world_size)
    how = Sharing(
        rank=rank,
        world=world_size,
        batch_size=batch_size,
        even=even_batches,
        split=split_batches,
        drop_last=getattr(sampler, "drop_last", False),
        batched=batched,
    )
    report_dropped = _drop_reporter(how, "at least " if stream else "")
    replaced: dict[str, Any] = {}
    if stream:
        replaced["dataset"] = StreamShard(loader.dataset, how)
        replaced["collate_fn"] = CountingCollate(loader.collate_fn, batched)
        if batched:
            assert batch_size is not None, "a DataLoader over a stream batches by a number only"
            replaced["batch_sampler"] = BatchSampler(loader.sampler, batch_size, loader.drop_last)
    else:
        replaced[sampler_key] = BatchShard(sampler, how, report_dropped)
    inner = copy.copy(loader)  # keeps the subclass and every argument, in any version of torch
    inner.__dict__.update(replaced, _iterator=None)  # attribute assignment is forbidden once a DataLoader is built
    active = ActiveLoaders() if active is None else active
    return ShardedLoader(inner, how, device=device, active=active, report_dropped=report_dropped)


def _check_loader(loader: Any, world_size: int) -> None:
    if isinstance(loader, ShardedLoader):
        raise LoopError("prepare: the loader is prepared already; prepare each loader once")
    if not isinstance(loader, DataLoader):
        raise LoopError(f"prepare: found a {type(loader).__name__}; give a torch.utils.data.DataLoader")
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    if world_size > 1 and any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        raise LoopError(
            "prepare: the loader's DistributedSampler shares the data already, and prepare() would share each part "
            "again; build the loader with shuffle=True (or False) and no DistributedSampler"
        )
    if world_size > 1 and not getattr(loader, "in_order", True):
        raise LoopError(
            "prepare: in_order=False lets the processes' batches drift apart; build the loader with in_order=True"
        )


def _split_size(batch_size: int | None, world_size: int) -> int:
    if batch_size is None or batch_size % world_size:
        found = "has no batch size" if batch_size is None else f"has batch_size={batch_size}"
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
