"""Smaller batches out of a DataLoader's own: the same samples in the same order, in more steps."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from zero_plugin.data.adapter import copy_loader
from zero_plugin.data.batch_sampler import CutBatchSampler
from zero_plugin.errors import LoopError

__all__ = ["cut_batches", "smaller_cut"]


def smaller_cut(micro_batch: int) -> int:
    """The least number of equal pieces that a micro-batch can be cut into: 2, or what else divides it.

    Args:
        micro_batch: its samples.

    Returns:
        0 where it is one sample.
    """
    return next((n for n in range(2, micro_batch + 1) if micro_batch % n == 0), 0)


def cut_batches(loader: DataLoader[Any], cut: int, *, split_among: int = 1) -> DataLoader[Any]:
    """The loader with each of its batches cut into `cut` of one size.

    It gives what it would if it had been built with that batch size, except that `drop_last` still leaves out what it
    would have left out; of a stream, which ends unforeseen, only what does not fill a smaller batch. One that is only
    evaluated with stays as it is where it cannot be cut so.

    Args:
        loader: as the script made it.
        cut: into how many.
        split_among: processes among which each batch is split; 1 where each gets whole ones.

    Raises:
        LoopError: it shuffles, so that it trains, and its batches cannot be cut into so many of one size.
    """
    if cut == 1:
        return loader
    batches: Any = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    size = getattr(batches, "batch_size", None)
    if size is None and isinstance(batches, list | tuple) and batches:
        size = len(batches[0])
    if not isinstance(size, int) or size % (cut * split_among):
        if isinstance(loader.sampler, SequentialSampler):
            return loader
        raise LoopError(
            f"memory ran out before, so that each of the loader's batches comes as {cut} micro-batches; this one has "
            f"{'no stated batch size' if size is None else f'batch_size={size}'}, which cannot be cut so.\n"
            f"Give it a batch_size that is a multiple of {cut * split_among}, or write a smaller one yourself."
        )
    smaller = size // cut
    if isinstance(loader.dataset, IterableDataset) or (type(batches) is BatchSampler and not batches.drop_last):
        cutter = BatchSampler(batches.sampler, smaller, batches.drop_last)
    else:
        cutter = CutBatchSampler(batches, smaller, cut)
    if batches is loader.sampler:
        return copy_loader(loader, sampler=cutter)
    return copy_loader(loader, batch_sampler=cutter, batch_size=None if loader.batch_size is None else smaller)
