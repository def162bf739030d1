"""Share the batches of a map-style data set among the processes, as lists of indices."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, SequentialSampler

from zero_plugin.collectives import broadcast_object_list, process_index
from zero_plugin.errors import LoopError

__all__ = ["BatchShard", "Share", "Sharing", "share_batches"]

_BATCHES_PER_BROADCAST = 1024


class Share(NamedTuple):
    """One process's part of one step.

    Attributes:
        indices: what the data set is asked for.
        samples: how many samples that is, repeated ones included.
        real: how many of them, from the front, are not repeated to make the step even.
    """

    indices: Any
    samples: int
    real: int


@dataclass(frozen=True, slots=True)
class Sharing:
    """How batches are shared.

    Attributes:
        rank, world: this process among how many.
        batch_size: samples in a full batch of one process; None where batches have no common size.
        even: complete the last step from the first samples of the epoch, so that every process has a full batch.
        split: each of the loader's batches is cut into one piece per process, instead of dealt out whole.
        drop_last: an incomplete last step is left out, as the loader was told.
        batched: False where the loader does not batch: then an item of its sampler or stream is a batch by itself, of
            unknown size, and stands here for one sample.
    """

    rank: int
    world: int
    batch_size: int | None
    even: bool = True
    split: bool = False
    drop_last: bool = False
    batched: bool = True


def share_batches(batches: Iterable[list[Any]], how: Sharing, report_dropped: Callable[[int], None]) -> Iterator[Share]:
    """This process's shares, one per step.

    At step k the processes' shares, in the order of ranks, are the batches k·world … (k+1)·world-1 of `batches`, or
    with `split` the pieces of batch k. Only the last step can be incomplete. It is then completed from the epoch's
    first samples (`even`), or left out on every process where some process would have nothing (`report_dropped` gets
    the number of samples lost, unless `drop_last` asked for it).

    Raises:
        LoopError: with `split`, a batch that is not the last does not hold world × batch_size samples.
    """
    steps = _cut(batches, how) if how.split else _deal(batches, how.world)
    step = next(steps, None)
    first = step
    while step is not None:
        following = next(steps, None)
        if len(step) > how.world or (following is not None and len(step) < how.world):
            raise LoopError(
                f"split_batches: the batch sampler gave {sum(map(len, step))} samples; every batch but the last must "
                f"hold {how.world} × {how.batch_size}. Use split_batches=False with batches of varying size"
            )
        if following is None and how.world > 1 and how.even and not how.drop_last:
            assert first is not None
            yield _complete(step, first, how)
        elif len(step) == how.world:
            own = step[how.rank]
            yield Share(own, len(own), len(own))
        elif not how.drop_last:
            report_dropped(sum(map(len, step)))
        step = following


class BatchShard:
    """The batch sampler of one process.

    The order is process 0's: it alone draws from the loader's sampler and sends the others the batches, a thousand at
    a time. So any sampler, seeded alike on all processes or not, of torch or the user's own, deals every sample out
    once, in the order that a single process with process 0's random state would see.

    Attributes:
        counts: of the batches drawn by the newest iteration and not yet taken off by the loader, which reads ahead: how
            many samples they hold, and how many of them, from the front, are not repeated ones.

    Args:
        batch_sampler: the loader's; with one process, or where it divides the data itself, its batches are taken as
            they come.
        how: how they are shared.
        report_dropped: gets the number of samples left out at an epoch's end.
        real: for a sampler that divides the data itself, how many samples of an epoch, from the front, are not repeated
            ones; None for all.
    """

    def __init__(
        self, batch_sampler: Any, how: Sharing, report_dropped: Callable[[int], None], real: int | None = None
    ) -> None:
        self.batch_sampler = batch_sampler
        self._real = real
        self.counts: deque[tuple[int, int]] = deque()
        self._how = how
        self._report_dropped = report_dropped
        self._skip = 0

    def skipping(self, count: int) -> BatchShard:
        """The same without the first `count` batches."""
        later = BatchShard(self.batch_sampler, self._how, self._report_dropped, self._real)
        later._skip = self._skip + count
        return later

    def __iter__(self) -> Iterator[Any]:
        self.counts = deque()  # a new one: an iteration still under way keeps its own
        return self._draw_shares(self.counts) if self._how.world > 1 else self._draw_alone(self.counts)

    def _draw_shares(self, counts: deque[tuple[int, int]]) -> Iterator[Any]:
        how, batches = self._how, self.batch_sampler
        if not _is_sequential(batches):
            batches = _drawn_by_main(batches)
        if not how.batched:
            batches = ([item] for item in batches)
        for share in islice(share_batches(batches, how, self._report_dropped), self._skip, None):
            counts.append((share.samples, share.real))
            yield share.indices if how.batched else share.indices[0]

    def _draw_alone(self, counts: deque[tuple[int, int]]) -> Iterator[Any]:
        """Every batch as it comes: one generator, since a tiny model's step is not much longer than a chain of them."""
        left = sys.maxsize if self._real is None else self._real
        for position, batch in enumerate(self.batch_sampler):
            indices = batch if not self._how.batched or hasattr(batch, "__len__") else list(batch)
            samples = len(indices) if self._how.batched else 1
            if position >= self._skip:
                counts.append((samples, min(samples, left)))
                yield indices
            left = max(0, left - samples)

    def __len__(self) -> int:
        how, batches = self._how, len(self.batch_sampler)
        if how.world == 1:
            steps = batches
        elif how.split:
            steps = batches - self._drops_a_split_batch()
        elif how.even and not how.drop_last:
            steps = -(-batches // how.world)
        else:
            steps = batches // how.world
        return max(0, steps - self._skip)

    def _drops_a_split_batch(self) -> bool:
        how = self._how
        if how.even or how.drop_last:
            return False
        assert how.batch_size is not None
        tail = len(self.batch_sampler.sampler) % (how.world * how.batch_size)
        return 0 < tail <= (how.world - 1) * how.batch_size


def _deal(batches: Iterable[list[Any]], world: int) -> Iterator[list[list[Any]]]:
    iterator = iter(batches)
    while step := [list(batch) for batch in islice(iterator, world)]:
        yield step


def _cut(batches: Iterable[list[Any]], how: Sharing) -> Iterator[list[list[Any]]]:
    size = how.batch_size
    assert size is not None
    for batch in map(list, batches):
        yield [batch[start : start + size] for start in range(0, len(batch), size)]


def _complete(step: list[list[Any]], first: list[list[Any]], how: Sharing) -> Share:
    """This process's share of the last step, filled up from the first step's samples, round and round."""
    if how.batch_size is None:  # nothing says what a full batch is: missing ones are the first ones over again
        missing = how.rank - len(step)
        own = step[how.rank] if missing < 0 else first[missing % len(first)]
        return Share(own, len(own), len(own) if missing < 0 else 0)
    filler = cycle(chain.from_iterable(first))
    for index in range(how.world):
        real = step[index] if index < len(step) else []
        own = real + list(islice(filler, max(0, how.batch_size - len(real))))
        if index == how.rank:
            return Share(own, len(own), len(real))
    raise AssertionError("rank is below world")


def _is_sequential(sampler: Any) -> bool:
    """Whether every process surely draws the same; a subclass may do anything."""
    return type(sampler.sampler if type(sampler) is BatchSampler else sampler) is SequentialSampler


def _drawn_by_main(batches: Iterable[Any]) -> Iterator[Any]:
    iterator = iter(batches) if process_index() == 0 else iter(())
    while True:
        box = [list(islice(iterator, _BATCHES_PER_BROADCAST))]
        broadcast_object_list(box)
        if not box[0]:
            return
        yield from box[0]
