"""Loaders that begin every epoch later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from zero_plugin.data.adapter import DataLoaderAdapter, copy_loader
from zero_plugin.data.batch_sampler import SkipBatchSampler
from zero_plugin.data.delivery import Delivery
from zero_plugin.data.loader import describe_alone
from zero_plugin.data.portion import Portion
from zero_plugin.errors import LoopError

__all__ = ["SkipDataLoader", "skip_first_batches"]


class SkipDataLoader(DataLoaderAdapter):
    """A DataLoader, not shared among processes, without its first batches, in every epoch; they are read.

    Args:
        dataset: for the DataLoader.
        skip_batches: how many batches are left out.
        use_stateful_dataloader: no difference: `state_dict` is always there.
        **kwargs: for the DataLoader.
    """

    _is_accelerate_prepared = False

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        del use_stateful_dataloader
        self._begin_later(DataLoader(dataset, **kwargs), skip_batches)

    @classmethod
    def around(cls, base: DataLoader[Any], skip_batches: int) -> SkipDataLoader:
        """Around a DataLoader that there is already."""
        loader = cls.__new__(cls)
        loader._begin_later(base, skip_batches)
        return loader

    def _begin_later(self, base: DataLoader[Any], skip_batches: int) -> None:
        self._wrap(base, describe_alone(base), Delivery())
        self._skip = skip_batches

    def _portions(self, skip: int) -> Iterator[Portion]:
        return self._read(skip)

    def _count_steps(self) -> int:
        return len(self.base_dataloader)


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """A loader over the same data that begins every epoch at batch `num_batches` of this process.

    Map-style data are not read for the batches skipped; a stream is read past them. Use it for the epoch in which a run
    resumes, and the original loader from then on.

    Args:
        dataloader: from `prepare`, or one that is not prepared yet.
        num_batches: how many batches are left out.

    Raises:
        LoopError: it is no DataLoader.
    """
    if isinstance(dataloader, DataLoaderAdapter):
        return dataloader.skipping(num_batches)
    if not isinstance(dataloader, DataLoader):
        raise LoopError(f"skip_first_batches: found a {type(dataloader).__name__}; give a torch.utils.data.DataLoader")
    sampler = dataloader.sampler if dataloader.batch_sampler is None else dataloader.batch_sampler
    if isinstance(dataloader.dataset, IterableDataset) or not _gives_batches(dataloader, sampler):
        return SkipDataLoader.around(dataloader, num_batches)
    key = "sampler" if dataloader.batch_sampler is None else "batch_sampler"
    return copy_loader(dataloader, **{key: SkipBatchSampler(sampler, num_batches)})


def _gives_batches(loader: DataLoader[Any], sampler: Any) -> bool:
    return sampler is loader.batch_sampler or isinstance(sampler, BatchSampler)
