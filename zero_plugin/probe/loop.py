"""Reads from the prepared DataLoaders what resolution needs to know of the training loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from zero_plugin.resolve.facts import LoopFacts

__all__ = ["probe_loop"]


def probe_loop(
    loaders: Sequence[DataLoader[Any]], *, processes: int = 1, split_batches: bool = False, sharded: bool = False
) -> LoopFacts:
    """Facts of the training loader: the first of `loaders` that shuffles, else the first.

    Args:
        loaders: the DataLoaders of one `prepare`.
        processes: data-parallel processes.
        split_batches: whether a loader's batch is the global one, to be split among the processes.
        sharded: whether the loaders already hold one process's share.
    """
    if not loaders:
        return LoopFacts()
    loader = next((candidate for candidate in loaders if _shuffles(candidate)), loaders[0])
    size, reason, fixed = _batch_size(loader)
    if size is not None and split_batches and not sharded:
        size, reason = max(1, size // processes), f"{reason} {size} ÷ {processes} processes (split_batches)"
    return LoopFacts(size, reason, fixed, _batches(loader, 1 if sharded or split_batches else processes))


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
    size = _first_dimension(next(iter(loader), None))
    return size, "the first batch of the training DataLoader" if size else "", False


def _first_dimension(batch: Any) -> int | None:
    """Length of the first tensor found in a nested batch."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else None
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return next((size for item in batch if (size := _first_dimension(item))), None)
    return None


def _batches(loader: DataLoader[Any], share: int) -> int | None:
    try:
        return -(-len(loader) // share)
    except TypeError:  # a stream has no length
        return None
