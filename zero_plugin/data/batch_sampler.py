"""Which samples a process gets of map-style data: batches of indices, divided among processes, cut and skipped.

And loaders with other batch samplers.
"""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from zero_plugin.distributed.collectives import broadcast_object_list, process_index
from zero_plugin.distributed.messages import working
from zero_plugin.distributed.seeding import Draws
from zero_plugin.errors import LoopError

_Item = TypeVar("_Item")


def take_skipped(batches: Iterator[_Item], count: int) -> Iterator[_Item]:
    """The first `count` batches, or as many as there are, which nobody trains on."""
    if count:
        with working("skipping batches", count, unit="batches") as work:
            for batch in islice(batches, count):
                work.advance()
                yield batch


class Share(NamedTuple):
    """One process's part of one step.

    Attributes:
        indices: the samples that are read from the dataset.
        real: how many of them, from the front, are not repetitions that make the step even.
    """

    indices: list[Any]
    real: int

    @property
    def samples(self) -> int:
        """How many samples it has, repeated ones included."""
        return len(self.indices)


@dataclass(frozen=True, slots=True)
class Sharing:
    """How batches are shared among processes.

    Attributes:
        rank, world: the rank of this process, and the number of processes.
        batch_size: samples in a full batch of one process; None where batches have no common size.
        even: complete the last step from the first samples of the epoch, so that every process has a full batch.
        split: each of the loader's batches is cut into one piece per process, instead of going to one process.
        drop_last: an incomplete last step is left out, as the loader was configured.
        batched: False where the loader does not batch: then an item of its sampler or stream is a batch by itself, of
            unknown size, and counts here as one sample.
        cut: the number of micro-batches into which each of the user's batches was cut before.
    """

    rank: int
    world: int
    batch_size: int | None
    even: bool = True
    split: bool = False
    drop_last: bool = False
    batched: bool = True
    cut: int = 1


def share_batches(
    batches: Iterable[list[Any]], sharing: Sharing, report_dropped: Callable[[int], None] | None
) -> Iterator[Share]:
    """This process's shares, one per step.

    At step k the processes' shares, in the order of ranks, are the batches k·world … (k+1)·world-1 of `batches`, or
    with `split` the pieces of batch k. Only the last step can be incomplete. It is then completed from the epoch's
    first samples (`even`), or left out on every process where some process would have nothing (`report_dropped` gets
    the number of samples lost, unless `drop_last` requested it). Without `report_dropped` each process goes on as far
    as its own shares reach, and the first ones may have one more than the last.

    Raises:
        LoopError: with `split`, a batch that is not the last does not hold world × batch_size samples.
    """
    steps = _cut(batches, sharing) if sharing.split and sharing.world > 1 else _deal(batches, sharing.world)
    step = first = next(steps, None)
    while step is not None:
        # Whether it is the last matters only where it is incomplete, and the batches may depend on when they are drawn.
        is_full = _is_full(step, sharing)
        following = None if is_full else next(steps, None)
        if len(step) > sharing.world or (following is not None and len(step) < sharing.world):
            raise LoopError(
                f"split_batches: the batch sampler gave {sum(map(len, step))} samples; every batch but the last must "
                f"hold {sharing.world} × {sharing.batch_size}. Use split_batches=False with batches of varying size"
            )
        if following is None and not is_full and sharing.even and not sharing.drop_last:
            assert first is not None
            yield _complete(step, first, sharing)
        elif len(step) == sharing.world or (
            sharing.rank < len(step) and report_dropped is None and not sharing.drop_last
        ):
            own = step[sharing.rank]
            yield Share(own, len(own))
        elif not sharing.drop_last and report_dropped is not None:
            report_dropped(sum(map(len, step)))
        step = next(steps, None) if is_full else following


def split_size(batch_size: int | None, num_processes: int) -> int:
    """What each process gets of batches that are split among all.

    Raises:
        ValueError: they cannot be.
    """
    if not batch_size or batch_size % num_processes:
        raise ValueError(
            f"split_batches: the batch size {batch_size} cannot be split among {num_processes} processes; "
            "make it a multiple of their number"
        )
    return batch_size // num_processes


def count_steps(samples: int, sharing: Sharing) -> int:
    """The number of steps in which every process has a batch, for a dataset of `samples` samples."""
    assert sharing.batch_size is not None
    full, tail = divmod(samples, sharing.world * sharing.batch_size)
    needed = 1 if sharing.even else (sharing.world - 1) * sharing.batch_size + 1  # below it, some process has nothing
    return full + (tail >= needed and not sharing.drop_last)


def _is_full(step: list[list[Any]], sharing: Sharing) -> bool:
    """Whether every process has a share of this step that does not need to be completed."""
    if len(step) != sharing.world:
        return False
    return (
        not sharing.even or sharing.drop_last or all(len(batch) == (sharing.batch_size or len(batch)) for batch in step)
    )


def _deal(batches: Iterable[list[Any]], world: int) -> Iterator[list[list[Any]]]:
    iterator = iter(batches)
    while step := [batch if hasattr(batch, "__len__") else list(batch) for batch in islice(iterator, world)]:
        yield step


def _cut(batches: Iterable[list[Any]], sharing: Sharing) -> Iterator[list[list[Any]]]:
    size = sharing.batch_size
    assert size is not None
    for batch in map(list, batches):
        yield [batch[start : start + size] for start in range(0, len(batch), size)]


def _complete(step: list[list[Any]], first: list[list[Any]], sharing: Sharing) -> Share:
    """This process's share of an incomplete last step, completed from the first step's samples, in turn."""
    if sharing.batch_size is None:
        # The size of a full batch is not known: batches of the first step replace those that are missing.
        missing = sharing.rank - len(step)
        return (
            Share(step[sharing.rank], len(step[sharing.rank])) if missing < 0 else Share(first[missing % len(first)], 0)
        )
    # All lower ranks are completed here too: each takes its samples from `filler` first.
    filler = cycle(chain.from_iterable(first))
    for real in [*step, *[[]] * sharing.world][: sharing.rank + 1]:
        own = [*real, *islice(filler, max(0, sharing.batch_size - len(real)))]
    return Share(own, len(real))


class SeedableRandomSampler(RandomSampler):
    """torch's RandomSampler, with its generator seeded by `initial_seed + epoch` at the start of each epoch.

    Each complete iteration ends an epoch, unless `set_epoch` sets another.

    Attributes:
        initial_seed: `data_seed`, or torch's seed when the sampler was made.
        epoch: the next one.

    Args:
        *args: of `torch.utils.data.RandomSampler`, as the other keyword arguments.
        data_seed: None takes torch's current seed.
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.initial_seed + self.epoch)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Begin with this epoch at the next start."""
        self.epoch = epoch


_BATCHES_PER_BROADCAST = 1024
# What they draw depends on nothing that happens in the loop, and their length is right. A subclass may do anything.
_TORCHS_OWN = (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    SeedableRandomSampler,
    range,
    tuple,
)


class _AroundBatchSampler(BatchSampler):
    """What the batch samplers here have of the one that they are made of.

    Attributes:
        batch_sampler: it; anything that gives lists of indices.
        batch_size: its batches' samples; None where they differ in size.
        drop_last: whether it leaves out an incomplete last batch.
    """

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler = batch_sampler
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]  # it may have none
        self.drop_last = getattr(batch_sampler, "drop_last", False)

    @property
    def sampler(self) -> Any:
        """What the batches are made of: the batch sampler's own sampler."""
        return self.batch_sampler.sampler

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self.batch_sampler.sampler = sampler

    @property
    def total_length(self) -> int:
        """Batches in an epoch, of all processes, and before any are skipped."""
        return len(self.batch_sampler)


class BatchSamplerShard(_AroundBatchSampler):
    """The batch sampler of one process.

    With W processes, process r gets batches r, r + W, … of all batches, or with `split_batches` the r-th piece of each.
    The last step is completed from the epoch's first samples, repeatedly if needed, unless the sampler drops it;
    without `even_batches`, only the first processes have a batch in it.

    In a prepared loader (`report_dropped` is given) the order is process 0's: it alone draws from the loader's sampler
    and sends the others the batches: those of torch's own samplers a thousand at a time, those of any other, which may
    have learnt from the loop, a step at a time. So any sampler, seeded alike on all processes or not, of
    torch or the user's own, deals every sample out once, in the order that a single process with process 0's random
    state would see. And all processes have equally many batches: what is left of an incomplete last step is left out.

    Attributes:
        even_batches: as given; another value counts from the next epoch on.
        counts: of the batches drawn by the newest iteration and not yet taken off by the loader, which reads ahead: how
            many samples they hold, and how many of them, from the front, are not repeated ones.
        draws: what the newest epoch's order was drawn from, by this process; None before.

    Args:
        batch_sampler: the batches of all processes; anything that gives lists of indices.
        num_processes: processes that share them; with one, in a prepared loader, they are taken as they come.
        process_index: this process.
        split_batches: each batch is cut into one piece per process, instead of going to one process.
        even_batches: complete the last step, so that every process has a full batch.
        report_dropped: gets the number of samples left out at an epoch's end.
        real: for a sampler that divides the data itself, how many samples of an epoch, from the front, are not repeated
            ones; None for all.
        batched: False where each item of the sampler is a batch by itself.

    Raises:
        ValueError: `split_batches` without a batch size that `num_processes` divides.
    """

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
        *,
        report_dropped: Callable[[int], None] | None = None,
        real: int | None = None,
        batched: bool = True,
    ) -> None:
        super().__init__(batch_sampler)
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.counts: deque[tuple[int, int]] = deque()
        self.draws: Draws | None = None
        self._report_dropped = report_dropped
        self._real = real
        self._batched = batched
        self._skip = 0
        self._draw_from: Draws | None = None
        if split_batches:
            split_size(self.batch_size, num_processes)

    def skipping(self, count: int) -> BatchSamplerShard:
        """The same batch sampler without the first `count` batches."""
        later = copy.copy(self)
        later._skip += count
        self._draw_from = None
        return later

    @property
    def resumes(self) -> bool:
        """Whether the coming epoch's order is one that was drawn before."""
        return self._draw_from is not None

    def draw_from(self, draws: Draws) -> None:
        """Draw the coming epoch's order from there."""
        self._draw_from = draws

    def __iter__(self) -> Iterator[Any]:
        self.counts = deque()  # a new one: an iteration still under way keeps its own
        return self._draw_shares(self.counts)

    def _draw_shares(self, counts: deque[tuple[int, int]]) -> Iterator[Any]:
        if self._report_dropped is None or self.num_processes == 1 or _is_sequential(self.batch_sampler):
            batches = self._drawn()
        else:
            step = 1 if self.split_batches else self.num_processes
            sure = len(self.batch_sampler) if has_exact_length_and_order(self.batch_sampler) else 0
            batches = _drawn_by_main(self._drawn, step, together=sure - step)
        if not self._batched:
            batches = ([item] for item in batches)
        left = sys.maxsize if self._real is None else self._real
        shares = share_batches(batches, self.sharing(), self._report_dropped)
        left = max(0, left - sum(share.samples for share in take_skipped(shares, self._skip)))
        for share in shares:
            counts.append((share.samples, min(share.real, left)))
            yield share.indices if self._batched else share.indices[0]
            left = max(0, left - share.samples)

    def _drawn(self) -> Iterator[Any]:
        sampler = getattr(self.batch_sampler, "sampler", self.batch_sampler)
        draws, self._draw_from = self._draw_from, None
        if draws is None:
            # Reading the state of the generators takes longer than a step of a tiny model.
            self.draws = Draws([], None) if _is_sequential(self.batch_sampler) else Draws.of(sampler)
            return iter(self.batch_sampler)
        self.draws = draws
        return draws.begin(iter(self.batch_sampler), sampler)

    def sharing(self) -> Sharing:
        """How it shares the coming epoch."""
        size = self.batch_size if self._batched else 1
        if self.split_batches:
            size //= self.num_processes
        return Sharing(
            self.process_index, self.num_processes, size, self.even_batches, self.split_batches, self.drop_last
        )

    def __len__(self) -> int:
        batches, world = len(self.batch_sampler), self.num_processes
        if self.split_batches:
            steps = batches - self._lacks_the_last_split_batch()
        elif self.even_batches and not self.drop_last:
            steps = -(-batches // world)
        else:
            steps = batches // world
            steps += self._report_dropped is None and not self.drop_last and self.process_index < batches % world
        return max(0, steps - self._skip)

    def _lacks_the_last_split_batch(self) -> bool:
        if self.even_batches or self.drop_last:
            return False
        size = self.batch_size // self.num_processes
        needed = self.process_index if self._report_dropped is None else self.num_processes - 1
        return 0 < len(self.batch_sampler.sampler) % self.batch_size <= needed * size


class SkipBatchSampler(_AroundBatchSampler):
    """A batch sampler without its first batches, in every epoch.

    Args:
        batch_sampler: all batches.
        skip_batches: how many are left out.
    """

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        super().__init__(batch_sampler)
        self.skip_batches = skip_batches

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.batch_sampler), self.skip_batches, None)

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip_batches)


class CutBatchSampler(_AroundBatchSampler):
    """A batch sampler's batches, each in pieces of one size; only the last piece of a batch may be smaller.

    What is not listed here (`set_epoch`, …) is the batch sampler's own.

    Args:
        batch_sampler: the batches before they are cut.
        batch_size: samples of a piece.
        pieces: of a full batch.
    """

    def __init__(self, batch_sampler: Any, batch_size: int, pieces: int) -> None:
        super().__init__(batch_sampler)
        self.batch_size: int = batch_size
        self._pieces = pieces

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "batch_sampler":  # looked up while it is copied, before it has one
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)

    def __iter__(self) -> Iterator[list[Any]]:
        for batch in map(list, self.batch_sampler):
            for start in range(0, len(batch), self.batch_size):
                yield batch[start : start + self.batch_size]

    def __len__(self) -> int:
        """Pieces in an epoch; at most `pieces` - 1 too many where a batch sampler's last batch may be smaller."""
        return len(self.batch_sampler) * self._pieces


def _is_sequential(sampler: Any) -> bool:
    """Whether every process surely draws the same; a subclass may do anything."""
    return type(sampler.sampler if type(sampler) is BatchSampler else sampler) is SequentialSampler


def has_exact_length_and_order(sampler: Any) -> bool:
    """Whether the length of the sampler is exact and its order does not depend on the loop.

    It is one of torch's samplers, possibly wrapped by this package.
    """
    while type(sampler) in (BatchSampler, CutBatchSampler, SkipBatchSampler):
        if type(sampler) is CutBatchSampler and not sampler.drop_last:
            return False  # len() may be too large if the last batch is smaller
        sampler = sampler.sampler if type(sampler) is BatchSampler else sampler.batch_sampler
    return type(sampler) in _TORCHS_OWN


def _drawn_by_main(draw: Callable[[], Iterator[Any]], step: int, together: int) -> Iterator[Any]:
    """The batches that process 0 draws, sent to all.

    Args:
        draw: begins to draw.
        step: batches of a step of all processes.
        together: how many of them to send a thousand at a time, the others step by step. The last step is not among
            them: in it a random sampler with the script's own generator may draw once more than in all before.
    """
    iterator = draw() if process_index() == 0 else iter(())
    while True:
        count = min(together, _BATCHES_PER_BROADCAST) if together > 0 else step
        together -= count
        drawn: list[Any] = broadcast_object_list([list(islice(iterator, count))])[0]
        yield from drawn
        if len(drawn) < count:
            return


def copy_loader(loader: DataLoader[Any], **attributes: Any) -> DataLoader[Any]:
    """A copy of the loader with other attributes; it keeps its subclass and every argument, in any version of torch."""
    copied = copy.copy(loader)
    copied.__dict__.update(attributes, _iterator=None)  # attribute assignment is forbidden once a DataLoader is built
    return copied


def batches_of(loader: DataLoader[Any]) -> Any:
    """The loader's batch sampler, which may also be its sampler; None where its dataset makes the batches."""
    if loader.batch_sampler is None and isinstance(loader.sampler, BatchSampler):
        return loader.sampler
    return loader.batch_sampler


def with_batches(loader: DataLoader[Any], batches: Any, **attributes: Any) -> DataLoader[Any]:
    """A copy of the loader with another batch sampler (or sampler, if it has no batch sampler) and other attributes."""
    key = "sampler" if loader.batch_sampler is None else "batch_sampler"
    return copy_loader(loader, **{**attributes, key: batches})


def shard_of(loader: DataLoader[Any]) -> BatchSamplerShard | None:
    """The part of the batches that the loader reads; None for a stream, or where nobody counts."""
    shard = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return shard if isinstance(shard, BatchSamplerShard) else None


def smaller_cut(micro_batch: int) -> int:
    """The least number of equal pieces that a micro-batch can be cut into: 2, or what else divides it.

    Args:
        micro_batch: its samples.

    Returns:
        0 where it is one sample.
    """
    return next((n for n in range(2, micro_batch + 1) if micro_batch % n == 0), 0)


def cut_batches(loader: DataLoader[Any], cut: int, *, split_among: int = 1) -> DataLoader[Any]:
    """The loader with each of its batches cut into `cut` of one size.

    It gives what it would if it had been built with that batch size, except that `drop_last` still leaves out what it
    would have left out; of a stream, which ends unforeseen, only what does not fill a smaller batch. One that is only
    evaluated with stays as it is where it cannot be cut so.

    Args:
        loader: as the script made it.
        cut: into how many.
        split_among: processes among which each batch is split; 1 where each process gets complete batches.

    Raises:
        LoopError: it shuffles, so that it trains, and its batches cannot be cut into so many of one size.
    """
    if cut == 1:
        return loader
    batches = batches_of(loader)
    size = getattr(batches, "batch_size", None)
    if size is None and isinstance(batches, list | tuple) and batches:
        size = len(batches[0])
    if not isinstance(size, int) or size % (cut * split_among):
        if isinstance(loader.sampler, SequentialSampler):
            return loader
        raise LoopError(
            f"memory ran out before, so that each of the loader's batches comes as {cut} micro-batches; this one has "
            f"{'no stated batch size' if size is None else f'batch_size={size}'}, which cannot be cut so.\n"
            f"Give it a batch_size that is a multiple of {cut * split_among}, or write a smaller one yourself."
        )
    smaller = size // cut
    if isinstance(loader.dataset, IterableDataset) or (type(batches) is BatchSampler and not batches.drop_last):
        cutter = BatchSampler(batches.sampler, smaller, batches.drop_last)
    else:
        cutter = CutBatchSampler(batches, smaller, cut)
    return with_batches(loader, cutter, batch_size=None if loader.batch_size is None else smaller)
