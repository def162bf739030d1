"""Reads from the DataLoaders given to prepare what resolution needs to know of the training loop."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from zero_plugin.resolve.facts import LoopFacts

__all__ = ["probe_loop"]


def probe_loop(
    loaders: Sequence[DataLoader[Any]], prepared: Sequence[Sized], *, processes: int = 1, split_batches: bool = False
) -> LoopFacts:
    """Facts of the training loader: the first of `loaders` that shuffles, else the first.

    Args:
        loaders: the DataLoaders of one `prepare`, as the user gave them.
        prepared: this process's part of each.
        processes: data-parallel processes.
        split_batches: whether a loader's batch is the global one, to be split among the processes.
    """
    if not loaders:
        return LoopFacts()
    index = next((index for index, candidate in enumerate(loaders) if _shuffles(candidate)), 0)
    size, reason, fixed = _batch_size(loaders[index])
    if size is not None and split_batches:
        size, reason = max(1, size // processes), f"{reason} {size} ÷ {processes} processes (split_batches)"
    return LoopFacts(size, reason, fixed, _length(prepared[index]))


def _shuffles(loader: DataLoader[Any]) -> bool:
    return isinstance(getattr(loader, "sampler", None), RandomSampler)


def _batch_size(loader: DataLoader[Any]) -> tuple[int | None, str, bool]:
    """Samples per batch, how that was found, and whether every full batch has it."""
    if loader.batch_size is not None:
        return loader.batch_size, "the training DataLoader's batch_size", True
    declared = getattr(loader.batch_sampler, "batch_size", None)
    if isinstance(declared, int):
        return declared, "the training DataLoader's batch_sampler.batch_size", True
    if isinstance(loader.dataset, IterableDataset):
        return None, "", False  # reading a batch of a stream could consume it
    size = _peek_size(loader)
    return size, "the first batch of the training DataLoader" if size else "", False


def _peek_size(loader: DataLoader[Any]) -> int | None:
    """Samples in a first batch; the random numbers that drawing it takes are given back."""
    states = random.getstate(), torch.get_rng_state()
    try:
        if loader.batch_sampler is not None:  # no need to read data, or to start workers
            return next((len(indices) for indices in loader.batch_sampler), None)
        index = next(iter(loader.sampler), None)
        return None if index is None else _first_dimension(loader.collate_fn(loader.dataset[index]))
    finally:
        random.setstate(states[0])
        torch.set_rng_state(states[1])


def _first_dimension(batch: Any) -> int | None:
    """Length of the first tensor found in a nested batch."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else None
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return next((size for item in batch if (size := _first_dimension(item))), None)
    return None


def _length(loader: Sized) -> int | None:
    try:
        return len(loader)
    except TypeError:  # a stream or a sampler has no length
        return None
