"""The loader that gives each process its part of a DataLoader, read by itself; and loaders that begin later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from zero_plugin.data.active import Delivery
from zero_plugin.data.adapter import DataLoaderAdapter
from zero_plugin.data.batch_sampler import SkipBatchSampler, batches_of, shard_of, with_batches
from zero_plugin.data.division import Portion, Sharing
from zero_plugin.data.stream import Division
from zero_plugin.distributed.collectives import gather_object, start_sum
from zero_plugin.errors import LoopError


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
        self._wrap(base, describe_alone(base, _drop_last), delivery, skip=skip_batches, epoch=iteration)

    def _portions(self, skip: int) -> Iterator[Portion]:
        return self._keep_together(skip) if self._ends_unknown else self._read(skip)

    def _keep_together(self, skip: int) -> Iterator[Portion]:
        """This process's portions, for as long as the processes go on together; every process must iterate it.

        Each portion costs one sum over the processes, of two integers. Nothing is read before it is asked for. A stream
        that divides itself is read again (`even`) by a process that is through with its part, whose portions are then
        repeats, until the last one is. Else all stop with the first.

        Raises:
            LoopError: the processes' streams are to be the same, and are not.
        """
        how = self._how
        begins_again = self._stream is not None and self._stream.division is not Division.BY_SKIPPING
        begins_again = begins_again and how.even and not how.drop_last
        portions, again = self._read(skip), iter(list[Portion]())
        last: Portion | None = None
        steps = 0
        portion = next(portions, None)
        _check_same(portion)
        while True:
            # On the CPU, even where batches go to a GPU: there it would have to wait for all that is queued.
            going, samples = start_sum([portion is not None, 0 if portion is None else portion.samples or 1])()
            if going == 0 or (going < how.world and (last is None or not begins_again)):
                if samples:
                    self._report_dropped(samples)
                return
            if portion is None:
                assert last is not None
                portion = next(again, None)
                if portion is None:
                    self._report_restart(steps)
                    again = self._read(skip)
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
            "the iterable dataset begins with other samples on each process, but prepare() shares out one stream.\n"
            "If it shuffles or augments, let it draw from a generator seeded alike on all processes, or from the "
            "global ones of Python, NumPy and torch, which prepare() makes equal for it. Only if it divides the data "
            "itself (by RANK, a hostname, …), write Accelerator(shard_iterable='never'): each process then takes all "
            "that its own copy gives."
        )


def describe_alone(base: DataLoader[Any], drop_last: bool = False) -> Sharing:
    """How a loader built by hand is shared: by the `BatchSamplerShard` that it was given, else not."""
    shard = shard_of(base)
    sampler = batches_of(base)
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
        base: DataLoader[Any] = DataLoader(dataset, **kwargs)
        self._wrap(base, describe_alone(base), Delivery(), skip=skip_batches)

    def _portions(self, skip: int) -> Iterator[Portion]:
        return self._read(skip)


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
    batches = batches_of(dataloader)
    if batches is None or isinstance(dataloader.dataset, IterableDataset):
        return SkipDataLoader.around(dataloader, describe_alone(dataloader), Delivery(), skip=num_batches)
    return with_batches(dataloader, SkipBatchSampler(batches, num_batches))
