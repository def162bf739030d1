"""The loader that `prepare` returns: this process's batches, on its device, one batch ahead of the loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from zero_plugin.collectives import broadcast
from zero_plugin.data.agree import keep_together
from zero_plugin.data.batches import BatchShard, Sharing
from zero_plugin.data.device import move_batch
from zero_plugin.data.epochs import Epochs
from zero_plugin.data.portion import Portion
from zero_plugin.data.stream import Division, StreamShard
from zero_plugin.errors import LoopError

__all__ = ["ActiveLoaders", "ShardedLoader", "skip_first_batches"]

_SEEDS = 2**62


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
        repeats_unseen: name of the user's sampler that shares the samples and may repeat some; None where repeats are
            known.
    """

    def __init__(
        self,
        inner: Any,
        how: Sharing,
        *,
        device: torch.device | None,
        active: ActiveLoaders,
        report_dropped: Callable[[int], None],
        report_restart: Callable[[int], None] = lambda _: None,
        ends_unknown: bool = False,
        repeats_unseen: str | None = None,
    ) -> None:
        self._inner = inner  # a DataLoader whose batch sampler is a BatchShard or whose data set is a StreamShard
        self._how = how
        self._device = device
        self._active = active
        self._report_dropped = report_dropped
        self._report_restart = report_restart
        self._skip = 0
        self._stream: StreamShard | None = inner.dataset if isinstance(inner.dataset, StreamShard) else None
        self._ends_unknown = ends_unknown and how.world > 1  # the processes have to agree on the last step
        self._batches: int | None = None  # of the running epoch
        self.dataset: Any = inner.dataset if self._stream is None else self._stream.dataset
        outer = None if self._stream is not None else self._shard().batch_sampler
        self._epochs = Epochs([self.dataset, outer, getattr(outer, "sampler", None)])
        self._workers_epoch: int | None = None  # what lasting workers' copies of the data set were told
        self.batch_size = how.batch_size if how.batched else None
        self.total_batch_size = None if self.batch_size is None else self.batch_size * how.world
        self.position = -1
        self.on_last_batch = False
        self.batch_samples: int | None = None
        self.real_samples: int | None = None
        self.repeats_unseen = repeats_unseen

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
        """Batches to come in this epoch after the current one; None where that is not known before the last one.

        A stream's own `__len__` is not relied on: worker processes and filters make it wrong.
        """
        if self.on_last_batch:
            return 0
        if self.position < 0:
            return self._count_batches()
        return None if self._batches is None else max(1, self._batches - self.position - 1)

    def skipping(self, count: int) -> ShardedLoader:
        """What `skip_first_batches` returns."""
        later = copy.copy(self)
        later._skip = self._skip + count
        if self._stream is None:
            later._inner = copy.copy(self._inner)
            key = "sampler" if self._inner.batch_sampler is None else "batch_sampler"
            later._inner.__dict__.update({key: self._shard().skipping(count), "_iterator": None})
        return later

    def set_epoch(self, epoch: int) -> None:
        """Tell the user's data set, batch sampler and sampler the epoch that begins next, each where it wants to know.

        A loop that never calls it gets the next epoch at each start.
        """
        self._epochs.choose(epoch)

    def __iter__(self) -> Iterator[Any]:
        self._begin_epoch()
        portions, device = self._portions(), self._device
        if self._ends_unknown:
            portions = self._keep_together(portions)
        self.position, self.on_last_batch, self._batches = -1, False, self._count_batches()
        self._active.enter(self)
        try:
            coming = next(portions, None)
            while coming is not None:
                batch, self.batch_samples, self.real_samples, _ = coming
                coming = next(portions, None)
                self.position += 1
                self.on_last_batch = coming is None
                yield batch if device is None else move_batch(batch, device)
        finally:
            self._active.leave(self)

    def _begin_epoch(self) -> None:
        self._epochs.begin()
        told = self._epochs.told(self.dataset)
        if self._stream is not None:
            seed = torch.initial_seed() % _SEEDS
            if self._how.world > 1:  # the copies of the data set have to draw alike
                seed = int(broadcast(torch.tensor(seed)))
            self._stream.begin_epoch(seed + self._epochs.current, told)
        elif told != self._workers_epoch and self._inner.__dict__.get("_iterator") is not None:
            self._inner.__dict__["_iterator"] = None  # lasting workers have copies of the data set: start new ones
        self._workers_epoch = told

    def _count_batches(self) -> int | None:
        if self._stream is not None:
            return None
        try:
            return len(self)
        except TypeError:  # a sampler without a length
            return None

    def _keep_together(self, portions: Iterator[Portion]) -> Iterator[Portion]:
        again = None
        if self._stream is not None and self._stream.division is not Division.BY_SKIPPING:
            again = self._portions if self._how.even and not self._how.drop_last else None
        return keep_together(
            portions,
            self._how.world,
            restart=again,
            report_dropped=self._report_dropped,
            report_restart=self._report_restart,
        )

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
        counts, batched = self._shard().counts, self._how.batched
        counted = self._inner.in_order  # else nobody knows which batch came first
        for batch in iterator:
            try:
                samples, real = counts.popleft()
            except IndexError:
                raise LoopError(
                    f"the {type(self._inner).__name__} gives batches that its batch sampler did not draw, so they "
                    "cannot be shared among the processes; prepare a torch.utils.data.DataLoader over the same data set"
                ) from None
            if batched:
                yield Portion(batch, samples if counted else None, real if counted else None)
            else:
                yield Portion(batch, None, 0 if real == 0 else None)


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
