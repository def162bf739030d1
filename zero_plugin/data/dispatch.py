"""`DataLoaderDispatcher`: process 0 reads for all processes, cuts batches by their rows, and sends the parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterDataPipe

from zero_plugin.data.batches import OverwriteCheck, Portion, count_rows, cut_rows, join_rows, map_tensors, move_batch
from zero_plugin.data.loader import DataLoaderAdapter, Delivery, refuse_mesh
from zero_plugin.data.sharing import Sharing
from zero_plugin.distributed.collectives import (
    broadcast,
    broadcast_object_list,
    broadcast_value,
    num_processes,
    process_index,
)
from zero_plugin.errors import LoopError
from zero_plugin.tensors.nested import list_leaves

SliceFunction = Callable[..., Any]


class DataLoaderDispatcher(DataLoaderAdapter):
    """A DataLoader that process 0 reads; each process gets its part of every batch.

    The datasets of the other processes are not read. A step is one batch per process, concatenated (with
    `split_batches`, one batch), and is split into equal parts in rank order. If the last step cannot be split equally,
    samples from the beginning of the epoch fill it (`even_batches`), or the first ranks get one sample more.

    Args:
        dataset: the dataset of the DataLoader.
        split_batches: a step is one batch.
        skip_batches: number of batches to skip at the beginning of each epoch.
        use_stateful_dataloader: has no effect: the loader always has `state_dict`.
        _drop_last: drop the last step if it has fewer batches than processes.
        _non_blocking: do not wait for batches to be copied.
        slice_fn: splits a step; its arguments are the step, a slice of samples, `process_index` and `num_processes`. If
            None, every tensor is split, and every list with one object per sample.
        torch_device_mesh: None, or a mesh of data parallelism only.
        iteration: the first epoch.
        **kwargs: other arguments of the DataLoader.
    """

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: SliceFunction | None = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        del use_stateful_dataloader
        refuse_mesh(torch_device_mesh)
        base: DataLoader[Any] = DataLoader(dataset, **kwargs)
        size, world = getattr(base.batch_sampler, "batch_size", base.batch_size), num_processes()
        sharing = Sharing(
            rank=process_index(),
            world=world,
            batch_size=size // world if split_batches and size else size,
            split=split_batches,
            drop_last=_drop_last,
            batched=base.batch_sampler is not None,
        )
        delivery = Delivery(non_blocking=_non_blocking)
        self._wrap(base, sharing, delivery, skip=skip_batches, epoch=iteration, slice_fn=slice_fn)

    def _wrap(self, *args: Any, slice_fn: SliceFunction | None = None, **options: Any) -> None:
        super()._wrap(*args, **options)
        self.split_batches = self._sharing.split
        self.slice_fn: SliceFunction = cut_rows if slice_fn is None else slice_fn

    def _portions(self, skip: int) -> Iterator[Portion]:
        sharing, target = self._sharing, self.device or torch.device("cpu")
        steps: Iterator[Any] = iter(())
        if sharing.rank == 0:
            steps = self._read_steps(skip)
        elif isinstance(self.base_dataloader.dataset, IterDataPipe):
            iter(self.base_dataloader)  # collective: torch then makes their shuffles equal, so every process must call
        first: Any = None
        while (step := self._share_step(next(steps, None), target)) is not None:
            samples = count_rows(step)
            if samples is None:
                raise LoopError(
                    "dispatch_batches: the batch holds neither a tensor nor a list with one entry per sample, so it "
                    "cannot be divided. Write dispatch_batches=None: each process then reads its own batches."
                )
            self.remainder = samples  # overwritten at each step: at the end, the last step's
            if first is None:
                first = map_tensors(Tensor.clone, cut_rows(step, slice(0, sharing.world)))
            part, rest = divmod(samples, sharing.world)
            if rest and sharing.even:  # append enough copies of the epoch's first samples for one more row per process
                step = join_rows([step, *[first] * -(-(sharing.world - rest) // (count_rows(first) or 1))])
                part, rest = part + 1, 0
            elif part == 0:
                self._report_dropped(samples)
                continue
            start = sharing.rank * part + min(sharing.rank, rest)
            rows = part + (sharing.rank < rest)
            own = self.slice_fn(
                step, slice(start, start + rows), process_index=sharing.rank, num_processes=sharing.world
            )
            yield Portion(own, rows, max(0, min(rows, samples - start)))

    def _share_step(self, step: Any, target: torch.device) -> Any:
        """Send process 0's step to every process; None at the end."""
        if self._sharing.world == 1:
            return step
        if step is not None:
            step = move_batch(step, target)
        shapes = broadcast_object_list([map_tensors(lambda tensor: tensor.to("meta"), step)])[0]
        if self._sharing.rank:
            step = map_tensors(lambda tensor: torch.empty_like(tensor, device=target), shapes)
        sent = iter(broadcast([leaf for leaf in list_leaves(step) if isinstance(leaf, Tensor)]))
        return map_tensors(lambda _: next(sent), step)

    def _read_steps(self, skip: int) -> Iterator[Any]:
        needed = 1 if self._sharing.split else self._sharing.world
        may_refill = needed > 1 and self._may_refill()
        batches = (portion.batch for portion in self._read(skip * needed))
        while True:
            step: list[Any] = []
            kept: list[OverwriteCheck] = []
            for batch in islice(batches, needed):
                step.append(batch)
                kept.append(OverwriteCheck(batch if may_refill else None))
            for one in kept:
                one.check()
            if not step or (len(step) < needed and self._sharing.drop_last):
                return
            yield join_rows(step)

    def _know_end(self, skip: int) -> tuple[bool, bool, int | None]:
        """Ask process 0, because only process 0 needs to have the data."""
        is_stream, is_sure, batches = broadcast_value(super()._know_end(skip))
        return is_stream, is_sure, batches

    def _count_steps(self) -> int:
        sharing, steps = self._sharing, super()._count_steps()
        if not sharing.split:
            steps = steps // sharing.world if sharing.drop_last else -(-steps // sharing.world)
        if sharing.even or sharing.drop_last or self.total_batch_size is None:
            return steps
        samples = len(self.dataset if self._shard is None else self._shard.sampler)
        is_left_out = 0 < samples % self.total_batch_size < sharing.world  # fewer than the processes
        return steps - is_left_out
