"""Iterable datasets divided among processes and their loaders' workers."""

from __future__ import annotations

import inspect
import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, IterDataPipe, get_worker_info
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.graph import traverse_dps
from torch.utils.data.graph_settings import apply_sharding, get_all_graph_pipes

from zero_plugin.data.batch_sampler import copy_loader, with_batches
from zero_plugin.data.batches import OverwriteCheck, Portion
from zero_plugin.data.sharing import Sharing, count_steps, share_batches, split_size
from zero_plugin.distributed.collectives import announce
from zero_plugin.distributed.seeding import SameDraws, generator_of
from zero_plugin.errors import LoopError
from zero_plugin.tensors.nested import list_leaves

ShardIterable = Literal["auto", "never"]

_FINGERPRINTED_BYTES = 4096  # of each leaf


class Division(Enum):
    """The party that divides a stream among the processes."""

    BY_SKIPPING = "each process reads all of it and keeps its part"
    BY_SHARD_METHOD = "the dataset, by its shard() method"
    BY_ITSELF = "the dataset, from rank and worker"


# Datasets of these libraries read the rank and the worker themselves, from the environment or the process group.
_DIVIDING_LIBRARIES = frozenset({"litdata", "streaming", "torchdata", "webdataset"})


def divides_itself(dataset: Any) -> bool:
    """Return whether an iterable dataset certainly gives each process and worker its own samples."""
    if isinstance(dataset, IterDataPipe):
        pipes = get_all_graph_pipes(traverse_dps(dataset))
        return any(hasattr(pipe, "is_shardable") and pipe.is_shardable() for pipe in pipes)
    if getattr(dataset, "_distributed", None) is not None:  # datasets.distributed.split_dataset_by_node sets this
        return True
    return any(kind.__module__.split(".")[0] in _DIVIDING_LIBRARIES for kind in type(dataset).__mro__)


def can_be_asked_for_its_shard(dataset: Any, world: int) -> bool:
    """Return whether `dataset.shard(num_shards=world, index=rank)` gives every process the same number of files."""
    shard = getattr(dataset, "shard", None)
    if not callable(shard) or not {"num_shards", "index"} <= inspect.signature(shard).parameters.keys():
        return False
    pieces = getattr(dataset, "num_shards", getattr(dataset, "n_shards", None))
    return not isinstance(pieces, int) or (pieces > 0 and pieces % world == 0)


def share_stream(loader: DataLoader[Any], sharing: Sharing, shard_iterable: ShardIterable) -> DataLoader[Any]:
    """Return a loader over this process's samples of its stream."""
    dataset: Any = loader.dataset
    if shard_iterable == "never" or divides_itself(dataset):
        division = Division.BY_ITSELF
        if sharing.shared_by > 1:
            raise LoopError(
                f"prepare: a {type(dataset).__name__} divides itself among all processes, but sequence_parallel_size "
                f"{sharing.shared_by} means that {sharing.shared_by} processes need the same samples.\n"
                "Use a map-style dataset, or a stream that is the same on all processes."
            )
    elif sharing.world > 1 and can_be_asked_for_its_shard(dataset, sharing.world):
        division = Division.BY_SHARD_METHOD
    else:
        division = Division.BY_SKIPPING
    if division is Division.BY_SKIPPING and sharing.rank == 0 and (sharing.world > 1 or loader.num_workers > 1):
        announce(
            f"{type(dataset).__name__}: each of {sharing.world} processes with {max(1, loader.num_workers)} loader "
            "workers reads all of the data and keeps its part; if the dataset gives each process and worker its own "
            "samples, write Accelerator(shard_iterable='never')"
        )
    batched = loader.batch_sampler is not None
    shared = copy_loader(
        loader,
        dataset=StreamShard(dataset, sharing, division, lasting_workers=loader.persistent_workers),
        collate_fn=CountingCollate(loader.collate_fn, batched),
    )
    if not batched:
        return shared
    assert sharing.batch_size is not None, "a DataLoader over a stream batches by a number only"
    return with_batches(shared, BatchSampler(loader.sampler, sharing.batch_size, loader.drop_last))


class Drawn(NamedTuple):
    """A sample of a stream, whether it is real, and the fingerprint of the stream's beginning."""

    sample: Any
    real: bool
    fingerprint: int | None


class StreamShard:
    """An iterable dataset's samples for one process and worker.

    A step is the next world × batch_size samples of the stream. By skipping, process r takes the r-th batch_size
    samples of each step. Its worker w reads the steps w, w + workers, …: a DataLoader asks the workers in this order,
    so the loader gives the same batches as one process without workers.

    If the dataset asks torch for the worker that it is in, it divides itself among the workers, and each worker's
    stream is shared separately. The end of a stream is completed from its beginning (`even`), left out (`drop_last`),
    or used as far as it goes.

    Skipping needs the same stream on every process: the copies draw the same random numbers while they are read.

    Attributes:
        dataset: the user's dataset.
        division: the party that divides the dataset among the processes.
        is_divided: whether the `worker_init_fn` of this worker has read the dataset, as it does to divide the dataset
            among the workers.
    """

    def __init__(self, dataset: Any, sharing: Sharing, division: Division, *, lasting_workers: bool = False) -> None:
        self.dataset = dataset
        self.division = division
        self.is_divided = False
        self._sharing = sharing
        # How skipping shares the samples: by one process only if the dataset is divided otherwise.
        rank, world = (sharing.rank, sharing.world) if division is Division.BY_SKIPPING else (0, 1)
        self._skipping = replace(sharing, rank=rank, world=world, split=False)
        self._seed_and_epoch = torch.tensor([0, -1])  # of the current epoch; -1 if no epoch is passed to the dataset
        if lasting_workers:  # persistent workers see changes of the main process only in shared memory
            self._seed_and_epoch.share_memory_()  # type: ignore[no-untyped-call]

    def begin_epoch(self, seed: int, epoch: int | None) -> None:
        """Set the seed of the next iteration, and the epoch that is passed to the dataset; None passes none."""
        self._seed_and_epoch[0], self._seed_and_epoch[1] = seed, -1 if epoch is None else epoch

    def __iter__(self) -> Iterator[Drawn]:
        sharing, world = self._skipping, self._skipping.world
        info = get_worker_info()
        workers, worker = (1, 0) if info is None else (info.num_workers, info.id)
        dataset = self._dataset_now(workers, worker)
        if self.division is Division.BY_ITSELF or self.is_divided:
            workers, worker = 1, 0
        if world == workers == 1 and not sharing.even:
            for sample in dataset:
                yield Drawn(sample, True, None)
            return
        draws_alike = world * workers > 1 or isinstance(dataset, IterDataPipe)
        same: AbstractContextManager[None] = SameDraws(int(self._seed_and_epoch[0])) if draws_alike else nullcontext()
        with same, WorkerWatch("id", "num_workers", "seed") as watch:
            samples = iter(dataset)
            first = self._read_step(samples)
        if watch.asked:
            workers, worker = 1, 0
        fingerprint = _fingerprint(first) if world > 1 and first else None
        assert sharing.batch_size is not None
        in_steps: Any = self._read_by_steps(first, samples, same)
        shares = share_batches(BatchSampler(in_steps, sharing.batch_size, sharing.drop_last), sharing, None)
        for share in islice(shares, worker, None, workers):
            for place, sample in enumerate(share.indices):
                yield Drawn(sample, place < share.real, fingerprint)

    def _read_by_steps(
        self, first: list[Any], samples: Iterator[Any], same: AbstractContextManager[None]
    ) -> Iterator[Any]:
        """Yield the samples of all processes; one step is read at a time."""
        sharing, step = self._skipping, first
        assert sharing.batch_size is not None
        first_samples = OverwriteCheck(first if sharing.even and not sharing.drop_last else None)
        while len(step) == sharing.world * sharing.batch_size:
            yield from step
            with same:
                step = self._read_step(samples)
        if step:
            first_samples.check()
        yield from step

    def _read_step(self, samples: Iterator[Any]) -> list[Any]:
        """Read the samples of one step: the next `batch_size` samples of every process.

        This process's samples are compared afterwards: a dataset that reuses its buffer for the next processes' samples
        would overwrite them.
        """
        own, rank, world = self._skipping.batch_size, self._skipping.rank, self._skipping.world
        assert own is not None
        step = list(islice(samples, (rank + 1) * own))
        own_samples = OverwriteCheck(step[rank * own :] if world > 1 else None)
        if len(step) == (rank + 1) * own:  # otherwise the stream has ended, and must not be asked again
            step += islice(samples, (world - rank - 1) * own)
        own_samples.check()
        return step

    def count_batches(self) -> int:
        """Return the steps of an epoch; TypeError if the dataset does not know its length."""
        return count_steps(len(self._dataset_now(1, 0)), self._skipping)

    def _dataset_now(self, workers: int, worker: int) -> Any:
        """Return the dataset to read from now on, set to the epoch."""
        sharing, epoch = self._sharing, int(self._seed_and_epoch[1])
        dataset = self.dataset
        if self.division is Division.BY_SHARD_METHOD:
            epoch = epoch if epoch >= 0 else getattr(dataset, "epoch", epoch)
            dataset = dataset.shard(num_shards=sharing.world, index=sharing.rank)
        elif self.division is Division.BY_ITSELF and isinstance(dataset, IterDataPipe):
            apply_sharding(dataset, workers * sharing.world, worker * sharing.world + sharing.rank)
        if isinstance(epoch, int) and epoch >= 0 and hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        return dataset


class CountingCollate:
    """The user's collate function for samples of type `Drawn`.

    The result is a `Portion`: the counts are sent with the batch through worker processes and pinning.

    Attributes:
        collate: the user's function.
    """

    def __init__(self, collate: Callable[[Any], Any], batched: bool) -> None:
        self.collate = collate
        self._batched = batched  # False: each sample of the stream is already a batch

    def __call__(self, drawn: Any) -> Portion:
        """Collate drawn samples; one sample if the loader does not batch."""
        if not self._batched:
            return Portion(self.collate(drawn.sample), None, None if drawn.real else 0, drawn.fingerprint)
        real = sum(one.real for one in drawn)
        return Portion(self.collate([one.sample for one in drawn]), len(drawn), real, drawn[0].fingerprint)


def _fingerprint(samples: list[Any]) -> int:
    """Return a checksum of the samples' tensors, arrays, numbers and strings.

    Other objects are left out: their `repr` may contain an address, which differs between processes.
    """
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


class WorkerWatch:
    """A context manager that replaces torch's worker info, and records whether the code inside reads it.

    In the main process, where `torch.utils.data.get_worker_info()` is None, it does nothing.

    Args:
        *names: the attributes of the worker info to watch.

    Attributes:
        asked: whether one of the attributes was read.
    """

    def __init__(self, *names: str) -> None:
        self.asked = False
        self._names = names
        self._info: Any = get_worker_info()

    def __getattr__(self, name: str) -> Any:
        if name in self._names:
            self.asked = True
        return getattr(self._info, name)

    def __enter__(self) -> WorkerWatch:
        if self._info is not None:
            torch_worker._worker_info = self  # type: ignore[assignment]  # there is no public way to notice a read
        return self

    def __exit__(self, *_: object) -> None:
        if self._info is not None:
            torch_worker._worker_info = self._info


class WorkerStart:
    """The `worker_init_fn` of a prepared loader, around the user's own.

    torch seeds worker w with the main process's draw plus w. If the processes have the same seed, their workers would
    have the same random numbers. So worker w of process r gets the draw plus r × workers + w; process 0's workers are
    seeded as in plain torch.

    Args:
        rank: the rank of this process.
        user_start: the user's `worker_init_fn`.
        stream: the loader reads a `StreamShard`. The user's function finds its own dataset in the worker info. If it
            reads that dataset, `StreamShard.is_divided` is set: it may have divided the data over the workers.
    """

    def __init__(self, rank: int, user_start: Callable[[int], Any] | None, *, stream: bool) -> None:
        self._rank = rank
        self._user_start = user_start
        self._stream = stream

    def __call__(self, worker: int) -> None:
        """Seed worker number `worker`, and run the user's function in it."""
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
        with WorkerWatch("dataset") as watch:
            self._user_start(worker)
        if self._stream:
            shard.is_divided = watch.asked


@dataclass(eq=False, repr=False)
class IterableDatasetShard(IterableDataset[Any]):
    """One process's samples of an iterable dataset; the other processes' samples are skipped.

    With W processes, process r gets the r-th `batch_size` of every W × `batch_size` samples, or with `split_batches`
    the r-th part of every `batch_size` samples. The first samples complete an incomplete end, repeated as needed, or
    the end is dropped. `prepare` shares streams itself, over the loader's workers too, and counts repeated samples.

    Args:
        dataset: the same on every process.
        batch_size: the batch size of one process, or with `split_batches` of all processes together.
        drop_last: leave out an incomplete end.
        num_processes: the number of processes that share the data.
        process_index: the index of this process.
        split_batches: whether `batch_size` counts the samples of all processes together.

    Raises:
        ValueError: `split_batches` is set, and `num_processes` does not divide the batch size.
    """

    dataset: Any
    batch_size: int = 1
    drop_last: bool = False
    num_processes: int = 1
    process_index: int = 0
    split_batches: bool = False
    epoch: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        # Samples of this process in each step.
        self._own = split_size(self.batch_size, self.num_processes) if self.split_batches else self.batch_size
        self._sharing = Sharing(self.process_index, self.num_processes, self._own, drop_last=self.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch to the dataset; if it has no `set_epoch`, the next iteration seeds its generator."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        """Return the number of samples of this process; TypeError if the dataset has no length."""
        return count_steps(len(self.dataset), self._sharing) * self._own

    def __iter__(self) -> Iterator[Any]:
        generator = generator_of(self.dataset)
        if generator is not None and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.epoch)
        for share in share_batches(BatchSampler(self.dataset, self._own, self.drop_last), self._sharing, None):
            yield from share.indices
