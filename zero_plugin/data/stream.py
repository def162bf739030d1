"""Iterable datasets divided among processes and their loaders' workers."""

from __future__ import annotations

import random
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from itertools import cycle, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, IterDataPipe, get_worker_info
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.graph_settings import apply_sharding

from zero_plugin.data.division import Portion, SameDraws, Sharing
from zero_plugin.data.read_ahead import Kept
from zero_plugin.distributed.collectives import num_processes
from zero_plugin.tensors.nested import list_leaves

_SETTLED_SECONDS = 0.01


def let_threads_settle(workers: int) -> None:
    """Wait a moment before a loader forks its workers, if a collective may just have ended.

    The communication threads enter Python then, to free tensors. Where one is about to when the process forks, the
    child waits for it for ever; Python 3.12 no longer does.
    """
    if workers and sys.version_info < (3, 12) and num_processes() > 1:
        time.sleep(_SETTLED_SECONDS)


class WorkerWatch:
    """Stands for torch's worker info while somebody's code runs, and notes what that code reads of it.

    Attributes:
        asked: whether one of the watched names was read.
    """

    def __init__(self, info: Any, names: frozenset[str]) -> None:
        self.asked = False
        self._info = info
        self._names = names

    def __getattr__(self, name: str) -> Any:
        if name in self._names:
            self.asked = True
        return getattr(self._info, name)


@contextmanager
def watch_worker(*names: str) -> Iterator[WorkerWatch]:
    """Watch what the code inside reads of `torch.utils.data.get_worker_info()`; in the main process it is None."""
    info: Any = get_worker_info()
    watch = WorkerWatch(info, frozenset(names))
    if info is None:
        yield watch
        return
    torch_worker._worker_info = watch  # type: ignore[assignment]  # there is no public way to be asked
    try:
        yield watch
    finally:
        torch_worker._worker_info = info


class WorkerStart:
    """The `worker_init_fn` of a prepared loader, around the user's own.

    torch seeds worker w with the main process's draw plus w: seeded alike, the processes would have workers with the
    same random numbers. Here worker w of process r gets that plus r × workers + w. Process 0's are as in plain torch.

    Args:
        rank: this process.
        user_start: the user's `worker_init_fn`.
        stream: the loader reads a `StreamShard`. The user's function finds its own dataset in the worker info, and if
            it takes it to divide the data, the `StreamShard` gets to know.
    """

    def __init__(self, rank: int, user_start: Callable[[int], Any] | None, *, stream: bool) -> None:
        self._rank = rank
        self._user_start = user_start
        self._stream = stream

    def __call__(self, worker: int) -> None:
        """Run first in worker number `worker`."""
        info: Any = get_worker_info()
        if self._rank:
            seed = info.seed + self._rank * info.num_workers
            object.__setattr__(info, "seed", seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.manual_seed(seed)
        if self._user_start is None:
            return
        shard = info.dataset
        if self._stream:
            object.__setattr__(info, "dataset", shard.dataset)
        with watch_worker("dataset") as watch:
            self._user_start(worker)
        if self._stream:
            shard.is_divided = watch.asked


_FINGERPRINTED_BYTES = 4096  # of each leaf


class Division(Enum):
    """Who divides a stream among the processes."""

    BY_SKIPPING = "each process reads all of it and keeps its part"
    BY_SHARD_METHOD = "the dataset, asked for its shard"
    BY_ITSELF = "the dataset, from rank and worker"


class Drawn(NamedTuple):
    """A sample of a stream, whether it is real, and the fingerprint of the stream's beginning."""

    sample: Any
    real: bool
    fingerprint: int | None


class StreamShard:
    """An iterable dataset's samples for one process and worker.

    By skipping, of every world × batch_size samples of the stream, a step, process r takes the r-th batch_size; its
    worker w reads the steps w, w + workers, …, which is the order in which a DataLoader asks them, so that it gives
    what one process without workers would. If the dataset asks torch which worker it is in, it divides itself among
    them, and each worker's stream is shared out as one of its own. The end of a stream is completed from its beginning
    (`even`), left out (`drop_last`), or dealt out as far as it goes.

    Copies that are skipped through must be the same: they draw the same random numbers while they are read.

    Attributes:
        dataset: the user's dataset.
        division: who divides it among the processes.
        is_divided: whether the worker's `worker_init_fn` took the dataset to divide it among the workers.
    """

    def __init__(self, dataset: Any, how: Sharing, division: Division, *, lasting_workers: bool = False) -> None:
        self.dataset = dataset
        self.division = division
        self.is_divided = False
        self._how = how
        self._clock = torch.tensor([0, -1])  # the epoch's seed, and the epoch that the dataset gets
        if lasting_workers:  # they see no other change in the main process
            self._clock.share_memory_()  # type: ignore[no-untyped-call]

    def begin_epoch(self, seed: int, epoch: int | None) -> None:
        """Set what the coming iteration draws from, and the epoch that the dataset gets; None for nothing."""
        self._clock[0], self._clock[1] = seed, -1 if epoch is None else epoch

    def __iter__(self) -> Iterator[Drawn]:
        how, (rank, world) = self._how, self._place()
        info = get_worker_info()
        workers, worker = (1, 0) if info is None else (info.num_workers, info.id)
        dataset = self._dataset_now(workers, worker)
        if self.division is Division.BY_ITSELF or self.is_divided:
            workers, worker = 1, 0
        if world == workers == 1 and not how.even:
            for sample in dataset:
                yield Drawn(sample, True, None)
            return
        assert how.batch_size is not None
        size = world * how.batch_size
        same: AbstractContextManager[None] = nullcontext()
        if world * workers > 1 or isinstance(dataset, IterDataPipe):
            same = SameDraws(int(self._clock[0]))
        with same, watch_worker("id", "num_workers", "seed") as watch:
            samples = iter(dataset)
            step = self._read_step(samples, size)
        if watch.asked:
            workers, worker = 1, 0
        fingerprint = _fingerprint(step) if world > 1 and step else None
        first = [Drawn(sample, False, fingerprint) for sample in step]
        kept = Kept(step if how.even and not how.drop_last else None)
        turn = 0
        while step and not (len(step) < size and how.drop_last):
            if turn == worker:
                drawn = [Drawn(sample, True, fingerprint) for sample in step]
                if how.even and len(step) < size:
                    kept.check()
                    drawn += islice(cycle(first), size - len(step))
                yield from drawn[rank * how.batch_size : (rank + 1) * how.batch_size]
            if len(step) < size:
                return
            turn = (turn + 1) % workers
            with same:
                step = self._read_step(samples, size)

    def _read_step(self, samples: Iterator[Any], size: int) -> list[Any]:
        """The next samples of all processes; reading the others' must not change this one's."""
        rank, world = self._place()
        if world == 1:
            return list(islice(samples, size))
        own = size // world
        step = list(islice(samples, (rank + 1) * own))
        kept = Kept(step[rank * own :])
        step += islice(samples, size - len(step))
        kept.check()
        return step

    def count_batches(self) -> int:
        """Steps in an epoch, where the dataset knows its length; TypeError where it does not."""
        how, (_, world) = self._how, self._place()
        assert how.batch_size is not None
        samples = len(self._dataset_now(1, 0))
        full, tail = divmod(samples, world * how.batch_size)
        needed = 1 if how.even else (world - 1) * how.batch_size + 1  # below it, some process has nothing
        return full + (tail >= needed and not how.drop_last)

    def _place(self) -> tuple[int, int]:
        """This process's place among those that skip each other's samples."""
        return (self._how.rank, self._how.world) if self.division is Division.BY_SKIPPING else (0, 1)

    def _dataset_now(self, workers: int, worker: int) -> Any:
        """The dataset to read from now on, set to the epoch."""
        how, epoch = self._how, int(self._clock[1])
        dataset = self.dataset
        if self.division is Division.BY_SHARD_METHOD and how.world > 1:
            epoch = epoch if epoch >= 0 else getattr(dataset, "epoch", epoch)
            dataset = dataset.shard(num_shards=how.world, index=how.rank)
        elif self.division is Division.BY_ITSELF and isinstance(dataset, IterDataPipe):
            apply_sharding(dataset, workers * how.world, worker * how.world + how.rank)
        if isinstance(epoch, int) and epoch >= 0 and hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        return dataset


class IterableDatasetShard(IterableDataset[Any]):
    """The samples of an iterable dataset that are one process's, by skipping the others'.

    With W processes, of every W × `batch_size` samples process r gets the r-th `batch_size`, or with `split_batches` of
    every `batch_size` samples the r-th part. An incomplete end is completed from the first samples, round and round, or
    dropped. `prepare` shares streams itself, over the loader's workers too, and counts the repeated samples.

    Args:
        dataset: the same on every process.
        batch_size: of one process, or with `split_batches` of all.
        drop_last: leave out an incomplete end.
        num_processes: processes that share the data.
        process_index: this process.
        split_batches: what `batch_size` counts.

    Raises:
        ValueError: `split_batches` with a batch size that `num_processes` does not divide.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches and batch_size % num_processes:
            raise ValueError(
                f"split_batches: the batch size {batch_size} cannot be split among {num_processes} processes; "
                "make it a multiple of their number"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.epoch = 0
        self._own = batch_size // num_processes if split_batches else batch_size  # samples of a step

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset, if it wants to know; one with a generator instead gets that seeded by the epoch."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        """Samples of this process; TypeError where the dataset has no length."""
        samples, step = len(self.dataset), self._own * self.num_processes
        return (samples // step if self.drop_last else -(-samples // step)) * self._own

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.epoch)
        samples, first, step = iter(self.dataset), list[Any](), self._own * self.num_processes
        mine = slice(self.process_index * self._own, (self.process_index + 1) * self._own)
        while drawn := list(islice(samples, step)):
            first = first or drawn
            if len(drawn) < step:
                if self.drop_last:
                    return
                drawn += islice(cycle(list(first)), step - len(drawn))
            yield from drawn[mine]


class CountingCollate:
    """The user's collate function, for samples that come with whether they are real.

    It makes a `Portion`, so that the counts travel with the batch through worker processes and pinning.

    Attributes:
        collate: the user's.
    """

    def __init__(self, collate: Callable[[Any], Any], batched: bool) -> None:
        self.collate = collate
        self._batched = batched  # False: each sample of the stream is a batch by itself

    def __call__(self, drawn: Any) -> Portion:
        """Collate what was drawn; one sample where the loader does not batch."""
        if not self._batched:
            return Portion(self.collate(drawn.sample), None, None if drawn.real else 0, drawn.fingerprint)
        real = sum(one.real for one in drawn)
        return Portion(self.collate([one.sample for one in drawn]), len(drawn), real, drawn[0].fingerprint)


def _fingerprint(samples: list[Any]) -> int:
    """Of tensors, numbers and text; other objects may print their address."""
    checksum = len(samples)
    for leaf in list_leaves(samples):
        if isinstance(leaf, Tensor) and leaf.device.type == "cpu" and leaf.layout is torch.strided:
            start = leaf.detach().flatten()[: _FINGERPRINTED_BYTES // leaf.element_size()]
            checksum = zlib.crc32(start.contiguous().view(torch.uint8).numpy().tobytes(), checksum)
        elif hasattr(leaf, "tobytes"):  # NumPy's arrays and numbers
            checksum = zlib.crc32(leaf.tobytes()[:_FINGERPRINTED_BYTES], checksum)
        elif isinstance(leaf, str | bytes | int | float | bool):
            checksum = zlib.crc32(repr(leaf).encode()[:_FINGERPRINTED_BYTES], checksum)
    return checksum
