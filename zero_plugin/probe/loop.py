"""Reads from the DataLoaders given to prepare what resolution needs to know of the training loop."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from zero_plugin.resolve.facts import LoopFacts

__all__ = ["probe_loop", "surely_train"]


def probe_loop(
    loaders: Sequence[DataLoader[Any]],
    prepared: Sequence[Sized],
    *,
    processes: int = 1,
    split_batches: bool = False,
    cut: int = 1,
) -> LoopFacts:
    """Facts of the training loader: the first of `loaders` that shuffles, else the first.

    Args:
        loaders: the DataLoaders of one `prepare`, as the user gave them.
        prepared: this process's part of each.
        processes: data-parallel processes.
        split_batches: whether a loader's batch is the global one, to be split among the processes.
        cut: into how many micro-batches each of its batches comes.
    """
    if not loaders:
        return LoopFacts()
    index = next((index for index, candidate in enumerate(loaders) if _shuffles(candidate)), 0)
    size, reason, fixed = _batch_size(loaders[index])
    if size is not None and split_batches:
        size, reason = max(1, size // processes), f"{reason} {size} ÷ {processes} processes (split_batches)"
    if size is not None and cut > 1:
        size, reason = max(1, size // cut), f"{reason} {size} ÷ {cut}, since memory ran out with more"
    given = _length(loaders[index])
    return LoopFacts(size, reason, fixed, _length(prepared[index]), None if given is None else given * cut)


def surely_train(loaders: Sequence[DataLoader[Any]]) -> bool:
    """Whether some loader is none for evaluation, which would go through its data in order."""
    return any(not isinstance(getattr(loader, "sampler", None), SequentialSampler) for loader in loaders)


def _shuffles(loader: DataLoader[Any]) -> bool:
    return isinstance(getattr(loader, "sampler", None), RandomSampler)


def _batch_size(loader: DataLoader[Any]) -> tuple[int | None, str, bool]:
    """Samples per batch, how that was found, and whether every full batch has it."""
    if loader.batch_size is not None:
        return loader.batch_size, "the training DataLoader's batch_size", True
    batches: Any = loader.batch_sampler
    if batches is None and isinstance(loader.sampler, BatchSampler):
        batches = loader.sampler
    declared = getattr(batches, "batch_size", None)
    if isinstance(declared, int):
        return declared, "the training DataLoader's batch_sampler.batch_size", True
    if isinstance(batches, list | tuple) and batches:
        return len(batches[0]), "the first batch that the training DataLoader lists", False
    return None, "", False  # what is drawn or read to look at it may be lost to the loop, or change its order


def _length(loader: Sized) -> int | None:
    try:
        return len(loader)
    except TypeError:  # a stream or a sampler has no length
        return None
