"""Which samples a process gets of map-style data: batches of indices, divided among processes, cut and skipped.

And loaders with other batch samplers.
"""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import xxhash
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from zero_plugin.data.sharing import (
    DRAWING_SAMPLERS,
    Order,
    Sharing,
    draw_alike,
    draw_here,
    draw_order,
    end_order,
    is_drawn_at_once,
    share_batches,
    share_order,
    split_size,
    take_skipped,
)
from zero_plugin.distributed.collectives import announce, broadcast_object_list, process_index
from zero_plugin.distributed.seeding import Draws, generator_of
from zero_plugin.errors import LoopError

_OTHER_ORDER = (
    "{} gives another order than before the run was interrupted: in this epoch samples are read twice or not at all. "
    "Its data, weights or indices are others, or the order follows from earlier epochs too, which are in no checkpoint."
)
# What they draw depends on nothing that happens in the loop, and their length is right. A subclass may do anything.
_TORCHS_OWN = (*DRAWING_SAMPLERS, DistributedSampler, SequentialSampler, range, tuple)


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


@dataclass(eq=False, repr=False)
class BatchSamplerShard(_AroundBatchSampler):
    """The batch sampler of one process.

    With W processes, process r gets batches r, r + W, … of all batches, or with `split_batches` the r-th piece of each.
    The last step is completed from the epoch's first samples, repeatedly if needed, unless the sampler drops it;
    without `even_batches`, only the first processes have a batch in it.

    In a prepared loader (`report_dropped` is given) the order is process 0's. Of torch's own samplers each process
    draws it from the state of process 0's generator. From any other, which may have learnt from the loop, process 0
    alone draws, and sends the others the batches of each step. So any sampler, seeded alike on all processes or not, of
    torch or the user's own, deals every sample out once, in the order that a single process with process 0's random
    state would see. And all processes have equally many batches: what is left of an incomplete last step is left out.

    A sampler of your own needs no more than torch's contract. Example, which gives the longest samples first:

        class LongestFirst(Sampler):
            def __init__(self, lengths):
                self.lengths = lengths

            def __iter__(self):
                return iter(sorted(range(len(self.lengths)), key=lambda i: -self.lengths[i]))

            def __len__(self):
                return len(self.lengths)

        data = [3, 9, 4, 7]
        loader = accelerator.prepare(DataLoader(data, batch_size=2, sampler=LongestFirst(data)))

    Attributes:
        even_batches: as given; another value counts from the next epoch on.
        counts: of the batches drawn by the newest iteration and not yet taken off by the loader, which reads ahead: how
            many samples they hold, and how many of them, from the front, are not repeated ones.
        draws: what the newest epoch's order was drawn from, by this process; None before.
        resumed: what the coming epoch's order is drawn from, where it was drawn before; else None.
        skip: batches that the coming epoch leaves out at its beginning.

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
        shared_by: how many processes have the same part, with which the order is agreed on too.

    Raises:
        ValueError: `split_batches` without a batch size that `num_processes` divides.
    """

    batch_sampler: Any
    num_processes: int = 1
    process_index: int = 0
    split_batches: bool = False
    even_batches: bool = True
    _: KW_ONLY
    report_dropped: Callable[[int], None] | None = None
    real: int | None = None
    batched: bool = True
    shared_by: int = 1
    counts: deque[tuple[int, int]] = field(default_factory=deque, init=False)
    draws: Draws | None = field(default=None, init=False)
    resumed: Draws | None = field(default=None, init=False)
    skip: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        super().__init__(self.batch_sampler)
        self._is_agreed = self.num_processes * self.shared_by > 1  # the order, among several processes
        if self.split_batches:
            split_size(self.batch_size, self.num_processes)

    def __iter__(self) -> Iterator[Any]:
        self.counts = deque()  # a new one: an iteration still under way keeps its own
        return self._draw_shares(self.counts)

    def end_resumed(self) -> None:
        """Leave the sampler as the epoch does at its end that was to be resumed, and of which no batch is to come."""
        resumed, self.resumed = self.resumed, None
        if resumed is not None and type(sampler := drawing_part(self.batch_sampler)) is RandomSampler:
            end_order(sampler, has_drawn=resumed.ended)

    def _draw_shares(self, counts: deque[tuple[int, int]]) -> Iterator[Any]:
        # Here, since torch makes two iterators for its workers and goes on with the second.
        skip, self.skip = self.skip, 0
        resumed, self.resumed = self.resumed, None
        sharing, left = self.sharing(), sys.maxsize if self.real is None else self.real
        # A sampler whose items are batches by themselves is shared as one of batches of one item.
        outer = self.batch_sampler if self.batched else BatchSampler(self.batch_sampler, 1, drop_last=False)
        sampler = outer.sampler if type(outer) is BatchSampler else None
        is_main = not self._is_agreed or process_index() == 0
        order, is_known = None, False
        if self.report_dropped is not None and self.real is None:
            order, is_known = self._draw_order(sampler, resumed, is_main=is_main)
        if order is not None and is_known:
            at_end = partial(self._end_order, sampler, resumed) if is_main else lambda: None
            shares = share_order(order, outer, sharing, self.report_dropped, skip=skip, at_end=at_end)
        else:
            draw = partial(self._drawn, outer, resumed) if order is None else partial(order.batches, outer)
            if self.report_dropped is None or not self._is_agreed:
                batches = draw()
            else:
                batches = _drawn_by_main(draw, 1 if self.split_batches else self.num_processes)
            shares = share_batches(batches, sharing, self.report_dropped)
            left = max(0, left - sum(share.samples for share in take_skipped(shares, skip)))
        for share in shares:
            counts.append((share.samples, min(share.real, left)))
            yield share.indices if self.batched else share.indices[0]
            left = max(0, left - share.samples)

    def _draw_order(self, sampler: Any, resumed: Draws | None, *, is_main: bool) -> tuple[Order | None, bool]:
        """The epoch's order, if this process has drawn it at once, and whether all know it; else process 0 sends it."""
        if type(sampler) is SequentialSampler:
            self.draws = Draws([], None)  # reading the state of the generators takes longer than a tiny model's step
            return draw_order(sampler), True
        order, state = None, None
        if is_main and is_drawn_at_once(sampler):
            order, self.draws, state = draw_here(sampler, resumed)
            self.draws = self.draws._replace(checksum=order.digest())
            _warn_of_another_order(sampler, resumed, self.draws)
        alike = draw_alike(sampler, order, state) if self._is_agreed else order
        return (order, False) if alike is None else (alike, True)

    def _drawn(self, outer: Any, resumed: Draws | None) -> Iterator[Any]:
        """The batches of all processes, one by one.

        Args:
            outer: the batch sampler, or one of batches of one item.
            resumed: what they are drawn from, where they were drawn before.
        """
        sampler = drawing_part(outer)
        if resumed is None:
            self.draws, batches = Draws.of(sampler), iter(outer)
        else:
            self.draws, batches = resumed, resumed.begin(outer, sampler)
        checksum = xxhash.xxh3_64()
        for drawn, batch in enumerate(batches, start=1):
            if " at 0x" not in (shown := repr(batch)):  # an object's address is another one in each process
                checksum.update(shown.encode())
            if drawn >= self.draws.drawn:
                self.draws = self.draws._replace(drawn=drawn, checksum=checksum.hexdigest())
                if resumed is not None and drawn == resumed.drawn:
                    _warn_of_another_order(sampler if type(outer) is BatchSampler else outer, resumed, self.draws)
            yield batch
        self.draws = self.draws._replace(ended=True)

    def _end_order(self, sampler: Any, resumed: Draws | None) -> None:
        end_order(sampler, has_drawn=resumed is not None and resumed.ended)
        if self.draws is not None:
            self.draws = self.draws._replace(ended=True)

    def sharing(self) -> Sharing:
        """How it shares the coming epoch."""
        size = self.batch_size if self.batched else 1
        if self.split_batches:
            size //= self.num_processes
        return Sharing(
            self.process_index, self.num_processes, size, self.even_batches, self.split_batches, self.drop_last
        )

    def __len__(self) -> int:
        batches, world = len(self.batch_sampler), self.num_processes
        if self.split_batches:
            steps = batches
            if not (self.even_batches or self.drop_last):
                needed = self.process_index if self.report_dropped is None else world - 1  # full pieces before its own
                last = len(self.batch_sampler.sampler) % self.batch_size
                steps -= 0 < last <= needed * (self.batch_size // world)
        elif self.even_batches and not self.drop_last:
            steps = -(-batches // world)
        else:
            steps = batches // world
            steps += self.report_dropped is None and not self.drop_last and self.process_index < batches % world
        return steps


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


def _warn_of_another_order(sampler: Any, before: Draws | None, now: Draws) -> None:
    if before is not None and before.checksum not in (None, now.checksum):
        announce(_OTHER_ORDER.format(type(sampler).__name__))


def drawing_part(batches: Any) -> Any:
    """What draws the order: the batch sampler, where it has a generator or no sampler, else its sampler."""
    return batches if generator_of(batches) is not None else getattr(batches, "sampler", batches)


def has_exact_length_and_order(sampler: Any) -> bool:
    """Whether the length of the sampler is exact and its order does not depend on the loop.

    It is one of torch's samplers, possibly wrapped by this package.
    """
    while type(sampler) in (BatchSampler, CutBatchSampler, SkipBatchSampler):
        if type(sampler) is CutBatchSampler and not sampler.drop_last:
            return False  # len() may be too large if the last batch is smaller
        sampler = sampler.sampler if type(sampler) is BatchSampler else sampler.batch_sampler
    return type(sampler) in _TORCHS_OWN


def _drawn_by_main(draw: Callable[[], Iterator[Any]], step: int) -> Iterator[Any]:
    """The batches that process 0 draws, sent to all, step by step.

    Args:
        draw: begins to draw.
        step: batches of a step of all processes.
    """
    iterator = draw() if process_index() == 0 else iter(())
    while True:
        drawn: list[Any] = broadcast_object_list([list(islice(iterator, step))])[0]
        yield from drawn
        if len(drawn) < step:
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
