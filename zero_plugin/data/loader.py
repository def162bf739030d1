"""The loader that gives each process its part, loaders that begin later, and what epochs leave out.

The loader that gives each process its part of a DataLoader, read by itself.

Streams of the processes end together, though nobody knows beforehand where.

Loaders that begin every epoch later.

Say once what a loader's epochs leave out or repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from zero_plugin.data.active import Delivery
from zero_plugin.data.adapter import DataLoaderAdapter, copy_loader, shard_of
from zero_plugin.data.batch_sampler import SkipBatchSampler
from zero_plugin.data.division import Portion, Sharing
from zero_plugin.data.stream import Division
from zero_plugin.distributed.collectives import gather_object, start_sum
from zero_plugin.distributed.together import announce
from zero_plugin.errors import LoopError


def keep_together(
    portions: Iterator[Portion],
    world: int,
    *,
    restart: Callable[[], Iterator[Portion]] | None,
    report_dropped: Callable[[int], None],
    report_restart: Callable[[int], None],
) -> Iterator[Portion]:
    """This process's portions, for as long as the processes go on together; every process must iterate it.

    Each portion costs one sum over the processes, of two integers. Nothing is read before it is asked for.

    Args:
        portions: this process's.
        world: number of processes.
        restart: reads this process's portions again from the beginning; then a process whose stream has ended goes on
            with them, as repeats, until the last one's has. Without it all stop with the first.
        report_dropped: gets the number of samples that the processes had at the step that was left out.
        report_restart: gets the number of steps that this process made before it began again.

    Raises:
        LoopError: the processes' streams are to be the same, and are not.
    """

    again: Iterator[Portion] = iter(())
    last: Portion | None = None
    steps = 0
    portion = next(portions, None)
    _check_same(portion)
    while True:
        # On the CPU, even where batches go to a GPU: there it would have to wait for all that is queued.
        going, samples = start_sum([portion is not None, 0 if portion is None else portion.samples or 1])()
        if going == 0 or (going < world and (restart is None or last is None)):
            if samples:
                report_dropped(samples)
            return
        if portion is None:
            assert restart is not None
            assert last is not None
            portion = next(again, None)
            if portion is None:
                report_restart(steps)
                again = restart()
                portion = next(again, last)  # a stream that can be read once has nothing more
            portion = portion._replace(real=0)
        last = portion
        steps += 1
        yield portion
        portion = next(portions, None)


def _check_same(first: Portion | None) -> None:
    """All processes share out one stream: that it is the same everywhere shows in its beginning."""
    found = gather_object([None if first is None else first.fingerprint])
    if len({fingerprint for fingerprint in found if fingerprint is not None}) > 1:
        raise LoopError(
            "the iterable data set begins with other samples on each process, but prepare() shares out one stream.\n"
            "If it shuffles or augments, let it draw from a generator seeded alike on all processes, or from the "
            "global ones of Python, NumPy and torch, which prepare() makes equal for it. Only if it divides the data "
            "itself (by RANK, a hostname, …), write Accelerator(shard_iterable='never'): each process then takes all "
            "that its own copy gives."
        )


class DropReport:
    """Called with the number of samples that all processes leave out at an epoch's end; process 0 says it once.

    Args:
        how: how the loader is shared.
        is_least: whether the number is what is known, and more may be left out.
    """

    def __init__(self, how: Sharing, *, is_least: bool = False) -> None:
        self._how = how
        self._is_least = is_least
        self._told = False

    def __call__(self, samples: int) -> None:
        """Say it, the first time."""
        if not self._told and self._how.rank == 0:
            self._told = True
            what = "samples" if self._how.batched else "batches"
            least = "at least " if self._is_least else ""
            announce(
                f"{what} left out: {least}{samples} at the end of each epoch, so that all {self._how.world} processes "
                "stop together; even_batches: true repeats samples instead"
            )


class RestartReport:
    """Called with the number of steps after which this process's part of the data begins again; says it once."""

    def __init__(self) -> None:
        self._told = False

    def __call__(self, steps: int) -> None:
        """Say it, the first time."""
        if not self._told:
            self._told = True
            announce(
                f"this process's part of the data ended after {steps} batches, before another's; it begins again, and "
                "gather_for_metrics leaves the repeats out. even_batches: false stops all at the shortest",
                by_each=True,
            )


class DataLoaderShard(DataLoaderAdapter):
    """This process's part of a DataLoader.

    The union of the processes' batches at step k, in the order of ranks, is batches k·world … (k+1)·world-1 of the
    loader as one process would see it (with `split_batches`: the pieces of batch k).

    Built by hand, it reads what it is given and shares nothing: `prepare` does that, or a `BatchSamplerShard` or
    `IterableDatasetShard` that it gets.

    Args:
        dataset: for the DataLoader.
        device: where batches go; None leaves them where they are.
        rng_types: random states that every process gets from process 0 at the start of each epoch.
        synchronized_generator: the one meant by `generator` among them.
        skip_batches: left out at the beginning of every epoch.
        use_stateful_dataloader: no difference: `state_dict` is always there.
        _drop_last: an incomplete last batch is left out.
        _non_blocking: do not wait for batches to be copied.
        torch_device_mesh: None, or of data parallelism alone.
        iteration: the first epoch.
        **kwargs: for the DataLoader.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device | None = None,
        rng_types: Iterable[str | Enum] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        del use_stateful_dataloader
        refuse_mesh(torch_device_mesh)
        base: DataLoader[Any] = DataLoader(dataset, **kwargs)
        delivery = Delivery(device, _non_blocking, tuple(rng_types or ()), synchronized_generator)
        self._share(base, describe_alone(base, _drop_last), delivery)
        self._skip = skip_batches
        if iteration:
            self.set_epoch(iteration)

    @classmethod
    def sharing(
        cls,
        base: DataLoader[Any],
        how: Sharing,
        delivery: Delivery,
        *,
        ends_unknown: bool = False,
        repeats_unseen: str | None = None,
    ) -> DataLoaderShard:
        """Around a DataLoader whose batch sampler is a BatchSamplerShard, or whose data set is a StreamShard.

        Args:
            base: it.
            how: its batches are shared.
            delivery: how they reach the loop.
            ends_unknown: the processes have to agree on the last step.
            repeats_unseen: name of the user's sampler that shares the samples and may repeat some.
        """
        shard = cls.__new__(cls)
        shard._share(base, how, delivery)
        shard._ends_unknown = ends_unknown and how.world > 1
        shard.repeats_unseen = repeats_unseen
        return shard

    def _share(self, base: DataLoader[Any], how: Sharing, delivery: Delivery) -> None:
        self._wrap(base, how, delivery)
        self._ends_unknown = False
        self._report_dropped: Callable[[int], None] = DropReport(how, is_least=True)
        self._report_restart = RestartReport()

    def _portions(self, skip: int) -> Iterator[Portion]:
        if not self._ends_unknown:
            return self._read(skip)
        again = None
        if self._stream is not None and self._stream.division is not Division.BY_SKIPPING:
            again = partial(self._read, skip) if self._how.even and not self._how.drop_last else None
        return keep_together(
            self._read(skip),
            self._how.world,
            restart=again,
            report_dropped=self._report_dropped,
            report_restart=self._report_restart,
        )

    def _is_length_sure(self) -> bool:
        return super()._is_length_sure() and not self._ends_unknown

    def _count_steps(self) -> int:
        if self._stream is not None:
            return self._stream.count_batches()
        return len(self.base_dataloader if self._shard is None else self._shard)


def describe_alone(base: DataLoader[Any], drop_last: bool = False) -> Sharing:
    """How a loader built by hand is shared: by the `BatchSamplerShard` that it was given, else not."""
    shard = shard_of(base)
    sampler = base.sampler if isinstance(base.sampler, BatchSampler) else base.batch_sampler
    size: Any = getattr(sampler, "batch_size", base.batch_size)
    world = 1 if shard is None else shard.num_processes
    if shard is not None and shard.split_batches:
        size //= world
    return Sharing(
        rank=0 if shard is None else shard.process_index,
        world=world,
        batch_size=size,
        drop_last=drop_last or getattr(sampler, "drop_last", False),
        batched=sampler is not None,
    )


def refuse_mesh(mesh: Any) -> None:
    """Raise if a device mesh has processes that are to get the same batches.

    Raises:
        LoopError: a dimension of tensor, context, sequence or pipeline parallelism.
    """
    names = set(() if mesh is None else mesh.mesh_dim_names or ())
    if foreign := names - {"dp", "fsdp", "dp_replicate", "dp_shard"}:
        raise LoopError(
            f"torch_device_mesh: the dimensions {', '.join(sorted(foreign))} would give several processes the same "
            "batches, which the loaders here cannot; every process gets its own"
        )


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
