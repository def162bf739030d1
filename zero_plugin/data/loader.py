"""The prepared loaders: a DataLoader around another one that recognises the epoch's last batch."""

from __future__ import annotations

import copy
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from zero_plugin.data.active import RUNNING, DataLoaderStateMixin, GradientState
from zero_plugin.data.batch_sampler import (
    SkipBatchSampler,
    batches_of,
    has_exact_length_and_order,
    shard_of,
    with_batches,
)
from zero_plugin.data.batches import OverwriteCheck, Portion, move_batch
from zero_plugin.data.epochs import Epochs
from zero_plugin.data.resume import ResumePoint
from zero_plugin.data.sharing import Sharing, take_skipped
from zero_plugin.data.stream import Division, StreamShard
from zero_plugin.distributed.collectives import announce, broadcast, gather_values, num_processes, start_sum
from zero_plugin.distributed.messages import once
from zero_plugin.distributed.seeding import synchronize_rng_states, undisturbed
from zero_plugin.errors import LoopError
from zero_plugin.tensors.nested import list_leaves


@dataclass(frozen=True)
class Delivery:
    """The settings by which batches reach the loop.

    Attributes:
        device: the device of the batches; None leaves them where the loader makes them.
        non_blocking: do not wait for the copy to the device.
        rng_types: random states that every process gets from process 0 at the start of each epoch.
        generator: the dataset's own generator, which `generator` in `rng_types` means.
    """

    device: torch.device | None = None
    non_blocking: bool = False
    rng_types: tuple[str | Enum, ...] = ()
    generator: torch.Generator | None = None

    def begin_epoch(self) -> None:
        """Give every process the random states of process 0; collective if there are any."""
        known = [kind for kind in self.rng_types if self.generator is not None or str(kind) != "generator"]
        synchronize_rng_states(known, self.generator)


_SEEDS = 2**62
_BEGINS_AGAIN = (
    "this process's part of the data ended after {} batches, before another's; it begins again, and gather_for_metrics "
    "leaves the repeats out. even_batches: false stops all processes with the shortest part"
)
_READS_AHEAD = (
    "{}: while gradients accumulate, each batch is drawn before the loop has finished the previous one, to recognise "
    "the epoch's last. For a sampler that learns from the loop, write "
    "GradientAccumulationPlugin(sync_with_dataloader=False): windows then continue in the next epoch"
)
_Adapter = TypeVar("_Adapter", bound="DataLoaderAdapter")


@dataclass(eq=False)
class DropReport:
    """A log line, shown once, about the samples that all processes leave out at the end of each epoch.

    Args:
        sharing: how the loader's batches are shared.
        is_least: whether the number is a lower bound.
    """

    sharing: Sharing
    is_least: bool = False

    def __call__(self, dropped: int) -> None:
        """Log the number, the first time."""
        what, least = "samples" if self.sharing.batched else "batches", "at least " if self.is_least else ""
        if self.sharing.rank == 0 and once(self, "dropped"):
            announce(
                f"{what} left out: {least}{dropped} at the end of each epoch, because all {self.sharing.world} "
                "processes must stop together; even_batches: true repeats samples instead"
            )


class Reading:
    """The reading of an epoch for one loop, at most one batch ahead of the loop.

    Args:
        portions: the batches of this process; each is read only when needed.
        refills: whether the loader may reuse the memory of a batch for a later one.
    """

    def __init__(self, portions: Iterable[Portion] = (), *, refills: bool = False) -> None:
        self._portions = iter(portions)
        self._refills = refills
        self._following: list[Portion | None] = []  # the batch that was read ahead, None for the end
        self._held: list[Any] = []  # the tensors of the loop's batch that are still in the loader's memory

    def take(self) -> Portion | None:
        """Return the next batch for the loop; None at the end."""
        self._held = []
        return self._following.pop() if self._following else next(self._portions, None)

    def hold(self, made: Any, given: Any) -> None:
        """Remember the batch that the loop gets.

        Args:
            made: the batch as the loader made it.
            given: the batch as the loop gets it: moved to the device, in new containers.
        """
        if self._refills:
            unmoved = {id(leaf) for leaf in list_leaves(made)}
            self._held = [leaf for leaf in list_leaves(given) if id(leaf) in unmoved]

    def is_last(self) -> bool:
        """Read one batch ahead, and return whether the loop already has the last batch.

        Raises:
            LoopError: reading ahead has overwritten the loop's current batch.
        """
        if not self._following:
            current = OverwriteCheck(self._held)
            following = next(self._portions, None)
            self._following.append(following)
            current.check(following)
            self._held = []
        return self._following[0] is None

    def __reduce__(self) -> tuple[Any, ...]:
        return Reading, ()  # a copied loader has read nothing


class DataLoaderAdapter(DataLoader[Any], DataLoaderStateMixin):
    """A DataLoader around another; iterate over it once per epoch.

    The loop can ask at each batch whether this batch is the last of the epoch (`end_of_dataloader`):

    * Over map-style data with torch's own samplers, the length decides.
    * Over a stream, one batch is read ahead, after the previous one was moved to the device.
    * Any other sampler may depend on the loop. So one batch is read ahead only if `end_of_dataloader` or `batches_left`
      is read, as an accumulation window of several batches does; then all processes must read the attribute.

    Other attributes (`num_workers`, `sampler`, `collate_fn`, …) are the wrapped DataLoader's.

    Attributes:
        base_dataloader: the wrapped loader.
        dataset: the user's dataset.
        batch_size: samples per process and batch; None if batches have no common size.
        total_batch_size: samples per step over all processes; None if batches have no common size.
        cut: the number of batches into which each of the user's batches is cut.
        drop_last: whether an incomplete last step is left out.
        device: the device of the batches; None leaves them where the loader makes them.
    """

    _is_accelerate_prepared = True  # Accelerate's mark; libraries look for it
    # DataLoader's own `__setattr__` protects attributes that its constructor has set; this class does not call it.
    __setattr__ = object.__setattr__  # type: ignore[assignment]

    @classmethod
    def around(
        cls: type[_Adapter], base: DataLoader[Any], sharing: Sharing, delivery: Delivery, **options: Any
    ) -> _Adapter:
        """Wrap an existing DataLoader; for the options see `_wrap`."""
        loader = cls.__new__(cls)
        loader._wrap(base, sharing, delivery, **options)
        return loader

    def _wrap(
        self,
        base: DataLoader[Any],
        sharing: Sharing,
        delivery: Delivery,
        *,
        skip: int = 0,
        epoch: int = 0,
        ends_unknown: bool = False,
        repeats_unseen: str | None = None,
    ) -> None:
        """Initialize without DataLoader's constructor, which would create its own samplers.

        Args:
            base: the wrapped loader. A map-style dataset is shared by its `BatchSamplerShard`, a stream is a
                `StreamShard`.
            sharing: how its batches are shared.
            delivery: how batches reach the loop.
            skip: batches that are left out at the beginning of every epoch.
            epoch: the first epoch.
            ends_unknown: the processes must agree on the last step.
            repeats_unseen: see `DataLoaderStateMixin`.
        """
        self.base_dataloader = base
        self._sharing = sharing
        self._delivery = delivery
        self._stream: StreamShard | None = base.dataset if isinstance(base.dataset, StreamShard) else None
        self.dataset: Any = base.dataset if self._stream is None else self._stream.dataset
        self._is_stream = isinstance(self.dataset, IterableDataset)
        self._ends_unknown = ends_unknown and sharing.processes > 1
        self.repeats_unseen = repeats_unseen
        self._shard = shard_of(base)
        self._outer: Any = base.batch_sampler if self._shard is None else self._shard.batch_sampler
        self._epochs = Epochs([self.dataset, self._outer, getattr(self._outer, "sampler", None)])
        self._workers_epoch: int | None = None  # the epoch of the dataset copies in persistent workers
        self._skip = skip  # at the beginning of every epoch
        self._batches: int | None = None  # of the running epoch, by its length
        self._reading = Reading()
        self._is_last: bool | None = False  # whether the loop has the last batch; None if not known yet
        self._report_dropped = DropReport(sharing, ends_unknown)
        self.batch_size = sharing.batch_size if sharing.batched else None
        self.total_batch_size = None if self.batch_size is None else self.batch_size * sharing.world
        self._point = ResumePoint(base, self._epochs, self._shard, self._outer, self.total_batch_size)
        self.cut, self.drop_last = sharing.cut, sharing.drop_last
        self.device = delivery.device
        self.remainder = -1
        if epoch:
            self.set_epoch(epoch)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "base_dataloader":
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    @property
    def gradient_state(self) -> GradientState:
        """The state of the running loops, under Accelerate's name."""
        return GradientState()

    @property  # type: ignore[misc]  # torch's can be set
    def multiprocessing_context(self) -> Any:
        """The start method of workers."""
        return self.base_dataloader.multiprocessing_context

    def _count_steps(self) -> int:
        """Return the batches of a complete epoch on this process; TypeError for a stream without a length."""
        if self._stream is not None:
            return self._stream.count_batches()
        return len(self.base_dataloader if self._shard is None else self._shard)

    def __len__(self) -> int:
        """Return the batches per epoch on this process; TypeError for a stream without a length."""
        return max(0, self._count_steps() - self._skip)

    @property
    def total_dataset_length(self) -> int:
        """Samples in the dataset, over all processes; TypeError for a stream without a length."""
        return len(self.dataset)

    @property
    def epoch_length(self) -> int | None:  # type: ignore[override]
        """Batches per epoch, without those that this loader always skips; None if unknown, as for a stream."""
        return self._count_batches(self._skip)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the epoch's last, on all processes."""
        if self._is_last is None:
            if not (self._is_stream or has_exact_length_and_order(self._outer)) and once(self, _READS_AHEAD):
                announce(_READS_AHEAD.format(type(self.get_sampler() or self._outer).__name__))
            self._is_last = self._point.is_end = self._reading.is_last()
        return self._is_last

    @end_of_dataloader.setter
    def end_of_dataloader(self, is_last: bool) -> None:
        self._is_last = is_last

    @property
    def batches_left(self) -> int | None:
        """Batches in this epoch after the current one; None if unknown before the last one.

        A stream's own `__len__` is not used: worker processes and filters make it wrong.
        """
        if self.end_of_dataloader:
            return 0
        if self.position < 0:
            return self.epoch_length
        return None if self._batches is None else max(1, self._batches - self.position - 1)

    def skipping(self: _Adapter, count: int) -> _Adapter:
        """Return a copy that skips `count` more batches of every epoch; see `skip_first_batches`."""
        later = copy.copy(self)
        later._skip = self._skip + count
        return later

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch, and pass it to the user's dataset, batch sampler and sampler if they have `set_epoch`.

        In a loop that never calls this, each start begins the next epoch.
        """
        self._epochs.choose(epoch)

    @property
    def iteration(self) -> int:
        """The running epoch, the last one, or the epoch set since; 0 at first. Assigning calls `set_epoch`."""
        return max(0, self._epochs.current) if self._epochs.chosen is None else self._epochs.chosen

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        self.set_epoch(epoch)

    def get_sampler(self) -> Any:
        """Return the sampler of the batches; None without a sampler, as over a stream."""
        return None if self._is_stream else getattr(self._outer, "sampler", None)

    def set_sampler(self, sampler: Any) -> None:
        """Draw the batches from another sampler, from the next epoch on.

        Raises:
            LoopError: the loader has no sampler that can be replaced.
        """
        if self.get_sampler() is None:
            raise LoopError(
                f"set_sampler(): this loader over {type(self.dataset).__name__} has no sampler that can be replaced.\n"
                "Build a DataLoader with the sampler, and prepare() it."
            )
        self._outer.sampler = sampler
        self._epochs.follow([self.dataset, self._outer, sampler])

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        device, non_blocking, point = self.device, self._delivery.non_blocking, self._point
        first = self._begin_epoch()
        is_stream, is_sure, batches = self._know_end(first)
        reading = self._reading = Reading(self._portions(first), refills=self._may_refill())
        self._batches = batches
        self.begin()
        loop = self.loop
        point.enter(first, loop)
        try:
            while (portion := reading.take()) is not None:
                if is_sure and self.position + 1 == batches:
                    raise LoopError(self._describe_wrong_length("more"))
                made, self.batch_samples, self.real_samples, _ = portion
                if not self._sharing.is_counted:
                    self.real_samples = 0
                self.position += 1
                RUNNING.batches += 1
                point.batches, point.loaded = point.batches + 1, None  # it may have been loaded in this loop
                point.is_end = self.position + 1 == batches
                # In a list that is emptied: no reference here keeps the batch alive after the loop drops it.
                stays = device is None and is_sure
                given = [made if stays else move_batch(made, device, non_blocking=non_blocking)]
                if is_sure:
                    self._is_last = point.is_end
                else:
                    reading.hold(made, given[0])
                    self._is_last = None
                    if is_stream:
                        _ = self.end_of_dataloader
                yield given.pop()
            if is_sure and self.position + 1 != batches:
                raise LoopError(self._describe_wrong_length("fewer"))
            self._is_last = point.is_end = True
        finally:
            self.end()
            point.leave(loop, trains=self.trains)
            if self._reading is reading:  # drop the iterator of a loop that was left, to end its workers
                self._is_last = bool(self._is_last)
                self._reading = Reading()

    @property
    def generators(self) -> list[torch.Generator | None]:
        """The script's own generators; see `ResumePoint.generators`."""
        return self._point.generators

    @property
    def was_given_up(self) -> bool:
        """Whether the newest loop was left and will not continue; see `ResumePoint.was_given_up`."""
        return self._point.was_given_up

    @property
    def was_left_inside(self) -> bool:
        """Whether the newest loop was left and may continue; see `ResumePoint.was_left_inside`."""
        return self._point.was_left_inside

    def state_dict(self, *, is_over: bool = False) -> dict[str, Any]:
        """Return the position of the loop; see `ResumePoint.state_dict`."""
        return self._point.state_dict(is_over=is_over)

    def load_state_dict(self, state_dict: dict[str, Any], *, skip: bool = True) -> None:
        """Make the next loop resume at a saved position; see `ResumePoint.load_state_dict`."""
        self._point.load_state_dict(state_dict, skip=skip)

    def batches_had(self, state_dict: dict[str, Any]) -> int:
        """Return how many batches of this loader the interrupted epoch has had; see `ResumePoint.batches_had`."""
        return self._point.batches_had(state_dict)

    def _begin_epoch(self) -> int:
        """Begin an epoch, and return how many batches it skips."""
        skip = self._point.begin(self._skip)
        self._delivery.begin_epoch()
        self._epochs.begin()
        epoch = self._epochs.of(self.dataset)
        if self._stream is not None:
            seed = torch.initial_seed() % _SEEDS
            if self._sharing.processes > 1:  # the copies of the dataset must draw the same numbers
                seed = int(broadcast(torch.tensor(seed)))
            self._stream.begin_epoch(seed + self._epochs.current, epoch)
        elif epoch != self._workers_epoch and self.base_dataloader.__dict__.get("_iterator") is not None:
            # Persistent workers have copies of the dataset from an earlier epoch: start new workers.
            self.base_dataloader.__dict__["_iterator"] = None
        self._workers_epoch = epoch
        return skip

    def _know_end(self, skip: int) -> tuple[bool, bool, int | None]:
        """Return whether the next epoch reads ahead, whether its length is certain, and its length without `skip`."""
        # Subclasses of torch's loader may do anything.
        is_torchs = type(self.base_dataloader) is DataLoader and has_exact_length_and_order(self._outer)
        is_sure = is_torchs and not (self._is_stream or self._ends_unknown)
        return self._is_stream, is_sure, self._count_batches(skip)

    def _may_refill(self) -> bool:
        """Return whether the wrapped loader may reuse a batch's memory for another batch."""
        base = self.base_dataloader
        collate = getattr(base.collate_fn, "collate", base.collate_fn)
        return base.num_workers == 0 and not (base.batch_sampler is not None and collate is default_collate)

    def _describe_wrong_length(self, found: str) -> str:
        return (
            f"the loader gives {found} batches than its length, {self._batches}, although its sampler is torch's own. "
            f"Either the length of the {type(self.dataset).__name__} changed in the epoch, or it differs on process 0, "
            "or the batch sampler's batch_size was changed.\nLet the data grow or shrink only between epochs, and on "
            "all processes. For another batch size, prepare a DataLoader with it."
        )

    def _count_batches(self, skip: int) -> int | None:
        if self._stream is not None:
            return None
        try:
            return max(0, self._count_steps() - skip)
        except TypeError:  # a sampler without a length
            return None

    def _read(self, skip: int) -> Iterator[Portion]:
        """Yield the wrapped loader's batches after the first `skip`, with counts. Skipping reads no map-style data."""
        base, shard, point = self.base_dataloader, self._shard, self._point
        let_threads_settle(base.num_workers)
        if shard is not None:
            shard.skip = skip
        # Each iterator draws a seed for its workers. A resumed epoch has drawn its seed before the state was saved:
        # draw from a copy, to leave the script's random numbers as they are.
        is_seeded, point.is_seeded, own = point.is_seeded, False, base.generator
        if is_seeded:
            base.generator = (own or torch.default_generator).clone_state()
        try:
            iterator = iter(base)
        finally:
            base.generator = own
        if shard is None:
            with undisturbed() if is_seeded else nullcontext():
                deque(take_skipped(iterator, skip), maxlen=0)
            for batch in iterator:
                yield batch if isinstance(batch, Portion) else Portion(batch, None, None)
            return
        counts, batched = shard.counts, self._sharing.batched
        counted = base.in_order  # otherwise the counts cannot be matched with the batches
        for batch in iterator:
            try:
                samples, real = counts.popleft()
            except IndexError:
                raise LoopError(
                    f"the {type(base).__name__} gives batches that its batch sampler did not draw, so they "
                    "cannot be shared among the processes. Prepare a torch.utils.data.DataLoader over the same dataset."
                ) from None
            if batched:
                yield Portion(batch, samples if counted else None, real if counted else None)
            else:
                yield Portion(batch, None, 0 if real == 0 else None)

    def _portions(self, skip: int) -> Iterator[Portion]:
        """Return an iterator over this process's batches of an epoch, without the first `skip`."""
        return self._keep_together(skip) if self._ends_unknown else self._read(skip)

    def _keep_together(self, skip: int) -> Iterator[Portion]:
        """Yield this process's portions until the processes stop together; every process must iterate.

        Each portion costs one sum of two integers over the processes. Nothing is read before it is needed. If the
        dataset divides itself and `even` is set, a process that has read its part reads it again as repeats, until
        every process has read its part. Otherwise all processes stop with the first one.

        Raises:
            LoopError: the processes' streams must be the same, but differ.
        """
        sharing = self._sharing
        begins_again = self._stream is not None and self._stream.division is not Division.BY_SKIPPING
        begins_again = begins_again and sharing.even and not sharing.drop_last
        portions, again = self._read(skip), iter(list[Portion]())
        last: Portion | None = None
        steps = 0
        portion = next(portions, None)
        _check_same(portion)
        while True:
            # On the CPU, even if batches go to a GPU: a sum on the GPU would wait for all queued work.
            going, samples = start_sum([portion is not None, 0 if portion is None else portion.samples or 1])()
            if going == 0 or (going < sharing.processes and (last is None or not begins_again)):
                if samples:
                    self._report_dropped(samples // sharing.shared_by)
                return
            if portion is None:
                assert last is not None
                portion = next(again, None)
                if portion is None:
                    if once(self, _BEGINS_AGAIN):
                        announce(_BEGINS_AGAIN.format(steps), by_each=True)
                    again = self._read(skip)
                    portion = next(again, last)  # a stream that can be read only once has no batches left
                portion = portion._replace(real=0)
            last = portion
            steps += 1
            yield portion
            portion = next(portions, None)


_SETTLED_SECONDS = 0.01


def let_threads_settle(workers: int) -> None:
    """Wait a moment before a loader forks its workers, because a collective may just have ended.

    After a collective, communication threads enter Python to free tensors. If the process forks at this moment, the
    child waits for that thread forever. Python 3.12 no longer has this problem.
    """
    if workers and sys.version_info < (3, 12) and num_processes() > 1:
        time.sleep(_SETTLED_SECONDS)


def _check_same(first: Portion | None) -> None:
    """Compare the beginning of the stream on all processes: they must divide the same stream."""
    found = gather_values(None if first is None else first.fingerprint)
    if len({fingerprint for fingerprint in found if fingerprint is not None}) > 1:
        raise LoopError(
            "the iterable dataset begins with different samples on each process, but prepare() divides one stream.\n"
            "If it divides the data itself (by RANK, a hostname, …), write Accelerator(shard_iterable='never').\n"
            "If it shuffles or augments, let it draw from a generator with the same seed on all processes. Or let it "
            "draw from the global generators of Python, NumPy and torch, which prepare() makes equal."
        )


class DataLoaderShard(DataLoaderAdapter):
    """This process's part of a DataLoader.

    At step k, the processes' batches in the order of ranks are batches k·world … (k+1)·world-1 of the loader as one
    process would see it (with `split_batches`: the pieces of batch k).

    A shard that a script constructs reads all of its dataset. The data is only divided by `prepare`, or by a
    `BatchSamplerShard` or `IterableDatasetShard` among the arguments.

    Args:
        dataset: for the DataLoader.
        device: the device of the batches; None leaves them where the loader makes them.
        rng_types: random states that every process gets from process 0 at the start of each epoch.
        synchronized_generator: the generator that `generator` in `rng_types` means.
        skip_batches: batches that are left out at the beginning of every epoch.
        use_stateful_dataloader: has no effect: `state_dict` is always available.
        _drop_last: an incomplete last batch is left out.
        _non_blocking: do not wait for batches to be copied.
        torch_device_mesh: None, or a mesh of data parallelism only.
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


class SkipDataLoader(DataLoaderAdapter):
    """A DataLoader that reads and drops its first batches in every epoch; it is not shared among processes.

    Args:
        dataset: for the DataLoader.
        skip_batches: how many batches are dropped.
        use_stateful_dataloader: has no effect: `state_dict` is always available.
        **kwargs: for the DataLoader.
    """

    _is_accelerate_prepared = False

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        del use_stateful_dataloader
        base: DataLoader[Any] = DataLoader(dataset, **kwargs)
        self._wrap(base, describe_alone(base), Delivery(), skip=skip_batches)


def describe_alone(base: DataLoader[Any], drop_last: bool = False) -> Sharing:
    """Return how a loader of the script is shared: by its own `BatchSamplerShard`, or not at all."""
    shard, sampler = shard_of(base), batches_of(base)
    alone = Sharing(0, 1, getattr(sampler, "batch_size", base.batch_size), batched=sampler is not None)
    sharing = alone if shard is None else shard.sharing()
    return replace(sharing, drop_last=drop_last or getattr(sampler, "drop_last", False))


def refuse_mesh(mesh: Any) -> None:
    """Refuse a device mesh in which several processes need the same batches.

    Raises:
        LoopError: the mesh has a dimension of tensor, context, sequence or pipeline parallelism.
    """
    names = set(() if mesh is None else mesh.mesh_dim_names or ())
    if foreign := names - {"dp", "fsdp", "dp_replicate", "dp_shard"}:
        raise LoopError(
            f"torch_device_mesh: with the dimensions {', '.join(sorted(foreign))} several processes need the same "
            "batches. This is not supported: every process gets its own batches."
        )


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """Return a loader over the same data that begins every epoch at batch `num_batches` of this process.

    Skipped batches of map-style data are not read; a stream is read past them. Use the returned loader for the epoch in
    which a run resumes, and the original loader from then on.

    Args:
        dataloader: from `prepare`, or a loader that is not prepared yet.
        num_batches: how many batches are skipped.

    Raises:
        LoopError: `dataloader` is no DataLoader.
    """
    if isinstance(dataloader, DataLoaderAdapter):
        return dataloader.skipping(num_batches)
    if not isinstance(dataloader, DataLoader):
        raise LoopError(f"skip_first_batches: found a {type(dataloader).__name__}; give a torch.utils.data.DataLoader")
    batches = batches_of(dataloader)
    if batches is None or isinstance(dataloader.dataset, IterableDataset):
        return SkipDataLoader.around(dataloader, describe_alone(dataloader), Delivery(), skip=num_batches)
    return with_batches(dataloader, SkipBatchSampler(batches, num_batches))
