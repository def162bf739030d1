"""The loader that `prepare` returns: this process's batches, on its device, one batch ahead of the loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from zero_plugin.collectives import reduce
from zero_plugin.data.batches import BatchShard, Sharing
from zero_plugin.data.device import move_batch
from zero_plugin.data.portion import Portion
from zero_plugin.data.stream import StreamShard
from zero_plugin.errors import LoopError

__all__ = ["ActiveLoaders", "ShardedLoader", "skip_first_batches"]


class ActiveLoaders:
    """The loaders whose loops are running, innermost last; a facade owns one and hands it to `prepare_loader`."""

    def __init__(self) -> None:
        self._loaders: list[ShardedLoader] = []

    @property
    def current(self) -> ShardedLoader | None:
        """The loader of the innermost running loop."""
        return self._loaders[-1] if self._loaders else None

    def enter(self, loader: ShardedLoader) -> None:
        """A loop over `loader` begins."""
        self._loaders.append(loader)

    def leave(self, loader: ShardedLoader) -> None:
        """A loop over `loader` has ended; loops need not end in the order of their nesting."""
        newest = max(index for index, active in enumerate(self._loaders) if active is loader)
        del self._loaders[newest]


class ShardedLoader:
    """This process's part of a DataLoader; iterate it, as often as there are epochs.

    The union of the processes' batches at step k, in the order of ranks, is batches k·world … (k+1)·world-1 of the
    loader as one process would see it (with `split_batches`: the pieces of batch k). What is not listed here
    (`num_workers`, `sampler`, `collate_fn`, …) is the wrapped DataLoader's.

    Attributes:
        dataset: the user's data set.
        batch_size: samples per process and batch; None where batches have no common size.
        total_batch_size: samples per step over all processes; None likewise.
        position: index of the current batch in the epoch; -1 before the first.
        on_last_batch: whether the current batch is the epoch's last on all processes.
        batch_samples: samples in the current batch, repeated ones included; None where nobody counts.
        real_samples: samples, from the front of the current batch, that are not repeats; None for all.
    """

    def __init__(
        self,
        inner: Any,
        how: Sharing,
        *,
        device: torch.device | None,
        active: ActiveLoaders,
        report_dropped: Callable[[int], None],
    ) -> None:
        self._inner = inner  # a DataLoader whose batch sampler is a BatchShard or whose data set is a StreamShard
        self._how = how
        self._device = device
        self._active = active
        self._report_dropped = report_dropped
        self._skip = 0
        self._stream: StreamShard | None = inner.dataset if isinstance(inner.dataset, StreamShard) else None
        self.dataset: Any = inner.dataset if self._stream is None else self._stream.dataset
        self.batch_size = how.batch_size if how.batched else None
        self.total_batch_size = None if self.batch_size is None else self.batch_size * how.world
        self.position = -1
        self.on_last_batch = False
        self.batch_samples: int | None = None
        self.real_samples: int | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __len__(self) -> int:
        """Batches per epoch on this process; TypeError for a stream without a length."""
        return len(self._shard()) if self._stream is None else max(0, self._stream.count_batches() - self._skip)

    @property
    def total_dataset_length(self) -> int:
        """Samples in the data set, over all processes; TypeError for a stream without a length."""
        return len(self.dataset)

    @property
    def batches_left(self) -> int | None:
        """Batches to come in this epoch after the current one; None for a stream that has not come to its last one.

        A stream's own `__len__` is not relied on: worker processes and filters make it wrong.
        """
        if self.on_last_batch:
            return 0
        return None if self._stream is not None else len(self) - self.position - 1

    def skipping(self, count: int) -> ShardedLoader:
        """What `skip_first_batches` returns."""
        later = copy.copy(self)
        later._skip = self._skip + count
        if self._stream is None:
            later._inner = copy.copy(self._inner)
            key = "sampler" if self._inner.batch_sampler is None else "batch_sampler"
            later._inner.__dict__[key] = self._shard().skipping(count)
        return later

    def set_epoch(self, epoch: int) -> None:
        """Tell the user's data set, batch sampler and sampler the epoch, each where it wants to know."""
        outer = None if self._stream is not None else self._shard().batch_sampler
        parts: list[Any] = [self.dataset, outer, getattr(outer, "sampler", None)]
        for part in parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        portions = self._portions()
        self.position, self.on_last_batch = -1, False
        self._active.enter(self)
        try:
            coming = self._next_for_all(portions)
            while coming is not None:
                current, coming = coming, self._next_for_all(portions)
                self.position += 1
                self.on_last_batch = coming is None
                self.batch_samples, self.real_samples = current.samples, current.real
                yield current.batch if self._device is None else move_batch(current.batch, self._device)
        finally:
            self._active.leave(self)

    def _shard(self) -> BatchShard:
        shard = self._inner.sampler if self._inner.batch_sampler is None else self._inner.batch_sampler
        assert isinstance(shard, BatchShard)
        return shard

    def _portions(self) -> Iterator[Portion]:
        iterator = iter(self._inner)
        if self._stream is not None:
            for position, portion in enumerate(iterator):
                if position >= self._skip:
                    yield portion
            return
        shard = self._shard()
        shares = shard.shares
        for batch in iterator:
            share = shares.popleft()
            if self._how.batched:
                yield Portion(batch, share.samples, share.real)
            else:
                yield Portion(batch, None, None if share.real else 0)

    def _next_for_all(self, portions: Iterator[Portion]) -> Portion | None:
        """The next portion, or None on every process if some process has none."""
        portion = next(portions, None)
        if self._stream is None or self._how.world == 1:  # index lists are the same on all processes: no need to ask
            return portion
        samples = 0 if portion is None else portion.samples or 1
        having, samples = reduce(
            torch.tensor([portion is not None, samples], device=self._device).long(), "sum"
        ).tolist()
        if having == self._how.world:
            return portion
        if samples:
            self._report_dropped(samples)
        return None


def skip_first_batches(loader: ShardedLoader, count: int) -> ShardedLoader:
    """A loader over the same data that begins every epoch at batch `count` of this process.

    Map-style data are not read for the batches skipped; a stream is read past them. Use it for the epoch in which a run
    resumes, and the original loader from then on.

    Raises:
        LoopError: the loader does not come from prepare().
    """
    if not isinstance(loader, ShardedLoader):
        raise LoopError(
            f"skip_first_batches: found a {type(loader).__name__}; prepare the loader first: loader = prepare(loader)"
        )
    return loader.skipping(count)
