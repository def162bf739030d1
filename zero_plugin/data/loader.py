"""The loader that gives each process its part of a DataLoader, read by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from zero_plugin.data.adapter import DataLoaderAdapter, shard_of
from zero_plugin.data.agree import keep_together
from zero_plugin.data.batches import Sharing
from zero_plugin.data.delivery import Delivery
from zero_plugin.data.portion import Portion
from zero_plugin.data.reports import DropReport, RestartReport
from zero_plugin.data.stream import Division
from zero_plugin.errors import LoopError

__all__ = ["DataLoaderShard", "describe_alone", "refuse_mesh"]


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
