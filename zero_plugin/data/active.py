"""Which loaders' loops are running in this process, and what each of them tells of its loop."""

from __future__ import annotations

from typing import Any

__all__ = ["RUNNING", "ActiveLoaders", "DataLoaderStateMixin"]


class DataLoaderStateMixin:
    """What a loader tells of the loop that runs over it.

    Attributes:
        batch_size: samples per process and batch; None where batches have no common size.
        end_of_dataloader: whether the current batch is the epoch's last, on all processes.
        remainder: samples in the epoch's last step, over all processes, told at that step at the latest; 0 may stand
            for a full one, -1 for one that is not known or, where it is incomplete, is left out.
        position: index of the current batch in the loop; -1 before the first.
        batches_left: batches to come in this epoch after the current one; None where that is not known.
        batch_samples: samples in the current batch, repeated ones included; None where nobody counts.
        real_samples: samples, from the front of the current batch, that are not repeats; None for all.
        repeats_unseen: name of what shares the samples and may repeat some; None where repeats are known.
    """

    batch_size: int | None = None
    end_of_dataloader: bool = False
    remainder: int = -1
    position: int = -1
    batch_samples: int | None = None
    real_samples: int | None = None
    repeats_unseen: str | None = None

    @property
    def batches_left(self) -> int | None:
        """Batches to come in this epoch after the current one; None where that is not known before the last one."""
        return 0 if self.end_of_dataloader else None

    def reset(self) -> None:
        """No batch of an epoch was seen."""
        self.end_of_dataloader, self.position = False, -1
        self.remainder = _count_remainder(self)

    def begin(self) -> None:
        """A loop over the loader begins."""
        self.reset()
        RUNNING.enter(self)

    def end(self) -> None:
        """A loop over the loader has ended."""
        RUNNING.leave(self)


class ActiveLoaders:
    """The loaders whose loops are running, innermost last."""

    def __init__(self) -> None:
        self.loaders: list[DataLoaderStateMixin] = []

    @property
    def current(self) -> DataLoaderStateMixin | None:
        """The loader of the innermost running loop."""
        return self.loaders[-1] if self.loaders else None

    def enter(self, loader: DataLoaderStateMixin) -> None:
        """A loop over `loader` begins."""
        self.loaders.append(loader)

    def leave(self, loader: DataLoaderStateMixin) -> None:
        """A loop over `loader` has ended; loops need not end in the order of their nesting."""
        newest = max((index for index, active in enumerate(self.loaders) if active is loader), default=None)
        if newest is not None:
            del self.loaders[newest]


RUNNING = ActiveLoaders()


def _count_remainder(loader: Any) -> int:
    try:
        return -1 if loader.drop_last else loader.total_dataset_length % loader.total_batch_size
    except (AttributeError, TypeError):  # a stream, or batches of no common size
        return -1
