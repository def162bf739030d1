"""Batch samplers that select one process's samples of map-style data: batches of indices, shared, cut and skipped.

Also functions to copy a DataLoader with another batch sampler.
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
    "Its data, weights or indices have changed, or the order also depends on earlier epochs, which no checkpoint holds."
)
# Their draws do not depend on the loop, and their length is right. A subclass may do anything.
_TORCHS_OWN = (*DRAWING_SAMPLERS, DistributedSampler, SequentialSampler, range, tuple)


class _AroundBatchSampler(BatchSampler):
    """Base of the batch samplers that wrap another one.

    Attributes:
        batch_sampler: the wrapped one; anything that yields lists of indices.
        batch_size: samples per batch; None if batches differ in size.
        drop_last: whether the wrapped one leaves out an incomplete last batch.
    """

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler = batch_sampler
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]  # it may have none
        self.drop_last = getattr(batch_sampler, "drop_last", False)

    @property
    def sampler(self) -> Any:
        """The batch sampler's own sampler."""
        return self.batch_sampler.sampler

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self.batch_sampler.sampler = sampler

    @property
    def total_length(self) -> int:
        """Batches in an epoch over all processes, before any are skipped."""
        return len(self.batch_sampler)


@dataclass(eq=False, repr=False)
class BatchSamplerShard(_AroundBatchSampler):
    """The batch sampler of one process.

    With W processes, process r gets batches r, r + W, … of all batches, or with `split_batches` the r-th piece of each.
    The last step is completed from the epoch's first samples, repeatedly if needed, unless the sampler drops it;
    without `even_batches`, only the first processes have a batch in it.

    In a prepared loader (`report_dropped` is given) the order is process 0's. With torch's own samplers, each process
    draws the order from the state of process 0's generator. From any other sampler, which may have learnt from the
    loop, only process 0 draws, and sends the others the batches of each step.

    So every sampler, torch's or the user's own, gives each sample to one process, in the order that a single process
    with process 0's random state would see. The other processes' seeds do not matter. All processes have the same
    number of batches: the rest of an incomplete last step is left out.

    Your own sampler only needs torch's contract. Example, with the longest samples first:

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
        even_batches: the argument; a new value takes effect in the next epoch.
        counts: for each batch that the newest iteration has drawn and the loader, which reads ahead, has not used yet:
            its samples, and how many of them, from the front, are not repeated ones.
        draws: the random states from which this process drew the newest epoch's order; None before.
        resumed: the random states to draw the coming epoch's order from, if a resumed run drew it before; otherwise
            None.
        skip: batches that the coming epoch leaves out at its beginning.

    Args:
        batch_sampler: the batches of all processes; anything that yields lists of indices.
        num_processes: processes that share the batches; one process in a prepared loader uses all of them.
        process_index: the index of this process.
        split_batches: cut each batch into one piece per process, instead of giving it to one process.
        even_batches: complete the last step: every process has a full batch.
        report_dropped: gets the number of samples left out at an epoch's end.
        real: for a sampler that divides the data itself, how many samples of an epoch, from the front, are not repeated
            ones; None for all.
        batched: False if each item of the sampler is already a batch.
        shared_by: how many processes have the same part; they must agree on the order too.

    Raises:
        ValueError: `split_batches` is set, and `num_processes` does not divide the batch size.
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
        """Leave the sampler in its state at the end of the epoch to resume, because no batch of that epoch is left."""
        resumed, self.resumed = self.resumed, None
        if resumed is not None and type(sampler := drawing_part(self.batch_sampler)) is RandomSampler:
            end_order(sampler, has_drawn=resumed.ended)

    def _draw_shares(self, counts: deque[tuple[int, int]]) -> Iterator[Any]:
        # Reset these when the first batch is drawn, not in `__iter__`: with workers, torch makes two iterators and uses
        # only the second.
        skip, self.skip = self.skip, 0
        resumed, self.resumed = self.resumed, None
        sharing, left = self.sharing(), sys.maxsize if self.real is None else self.real
        # A sampler whose items are already batches is shared like batches of one item.
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
        """Draw the epoch's order, if it can be drawn immediately; otherwise process 0 sends batches step by step.

        Returns:
            The order, or None if this process has not drawn it; and whether all processes know the order.
        """
        if type(sampler) is SequentialSampler:
            # No generator is recorded: reading the states of generators takes longer than a tiny model's step.
            self.draws = Draws([], None)
            return draw_order(sampler), True
        order, state = None, None
        if is_main and is_drawn_at_once(sampler):
            order, self.draws, state = draw_here(sampler, resumed)
            self.draws = self.draws._replace(checksum=order.digest())
            _warn_of_another_order(sampler, resumed, self.draws)
        alike = draw_alike(sampler, order, state) if self._is_agreed else order
        return (order, False) if alike is None else (alike, True)

    def _drawn(self, outer: Any, resumed: Draws | None) -> Iterator[Any]:
        """Yield the batches of all processes, and record their draws.

        Args:
            outer: the batch sampler, or a batch sampler that makes batches of one item.
            resumed: the random states to draw from if a resumed run drew the batches before.
        """
        sampler = drawing_part(outer)
        if resumed is None:
            self.draws, batches = Draws.of(sampler), iter(outer)
        else:
            self.draws, batches = resumed, resumed.begin(outer, sampler)
        checksum = xxhash.xxh3_64()
        for drawn, batch in enumerate(batches, start=1):
            if " at 0x" not in (shown := repr(batch)):  # an object's address differs between processes
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
        """Return how the coming epoch is shared."""
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
                # Full pieces before its own; in a prepared loader, before the last process's: all stop together.
                needed = self.process_index if self.report_dropped is None else world - 1
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
        skip_batches: how many batches are left out.
    """

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        super().__init__(batch_sampler)
        self.skip_batches = skip_batches

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.batch_sampler), self.skip_batches, None)

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip_batches)


class CutBatchSampler(_AroundBatchSampler):
    """A batch sampler that cuts batches into pieces of one size; only the last piece of a batch may be smaller.

    Other attributes (`set_epoch`, …) are the batch sampler's own.

    Args:
        batch_sampler: the batches before they are cut.
        batch_size: samples of a piece.
        pieces: the number of pieces of a full batch.
    """

    def __init__(self, batch_sampler: Any, batch_size: int, pieces: int) -> None:
        super().__init__(batch_sampler)
        self.batch_size: int = batch_size
        self._pieces = pieces

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "batch_sampler":  # `copy` looks names up before `batch_sampler` is set
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)

    def __iter__(self) -> Iterator[list[Any]]:
        for batch in map(list, self.batch_sampler):
            for start in range(0, len(batch), self.batch_size):
                yield batch[start : start + self.batch_size]

    def __len__(self) -> int:
        """Return the pieces in an epoch; at most `pieces` - 1 too many if the last batch may be smaller."""
        return len(self.batch_sampler) * self._pieces


def _warn_of_another_order(sampler: Any, before: Draws | None, now: Draws) -> None:
    if before is not None and before.checksum not in (None, now.checksum):
        announce(_OTHER_ORDER.format(type(sampler).__name__))


def drawing_part(batches: Any) -> Any:
    """Return the object that draws the order: the batch sampler if it has a generator or no sampler, or its sampler."""
    return batches if generator_of(batches) is not None else getattr(batches, "sampler", batches)


def has_exact_length_and_order(sampler: Any) -> bool:
    """Return whether the length of the sampler is exact and its order does not depend on the loop.

    This is known only for torch's samplers, possibly wrapped by this package.
    """
    while type(sampler) in (BatchSampler, CutBatchSampler, SkipBatchSampler):
        if type(sampler) is CutBatchSampler and not sampler.drop_last:
            return False  # len() may be too large if the last batch is smaller
        sampler = sampler.sampler if type(sampler) is BatchSampler else sampler.batch_sampler
    return type(sampler) in _TORCHS_OWN


def _drawn_by_main(draw: Callable[[], Iterator[Any]], step: int) -> Iterator[Any]:
    """Yield the batches that process 0 draws and sends to all processes, step by step.

    Args:
        draw: begins to draw.
        step: the number of batches in a step of all processes.
    """
    iterator = draw() if process_index() == 0 else iter(())
    while True:
        drawn: list[Any] = broadcast_object_list([list(islice(iterator, step))])[0]
        yield from drawn
        if len(drawn) < step:
            return


def copy_loader(loader: DataLoader[Any], **attributes: Any) -> DataLoader[Any]:
    """Copy the loader with other attributes; the copy keeps the subclass and all arguments, in any torch version."""
    copied = copy.copy(loader)
    copied.__dict__.update(attributes, _iterator=None)  # DataLoader's __setattr__ forbids changes after construction
    return copied


def batches_of(loader: DataLoader[Any]) -> Any:
    """Return the loader's batch sampler, which may also be its sampler; None if its dataset makes the batches."""
    if loader.batch_sampler is None and isinstance(loader.sampler, BatchSampler):
        return loader.sampler
    return loader.batch_sampler


def with_batches(loader: DataLoader[Any], batches: Any, **attributes: Any) -> DataLoader[Any]:
    """Copy the loader with another batch sampler (or sampler, if it has no batch sampler) and other attributes."""
    key = "sampler" if loader.batch_sampler is None else "batch_sampler"
    return copy_loader(loader, **{**attributes, key: batches})


def shard_of(loader: DataLoader[Any]) -> BatchSamplerShard | None:
    """Return the loader's `BatchSamplerShard`; None for a stream, or if batches are not shared by one."""
    shard = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return shard if isinstance(shard, BatchSamplerShard) else None


def smaller_cut(micro_batch: int) -> int:
    """Return the smallest number of equal pieces, at least 2, that a micro-batch can be cut into.

    Args:
        micro_batch: the number of its samples.

    Returns:
        The number of pieces; 0 for one sample.
    """
    return next((n for n in range(2, micro_batch + 1) if micro_batch % n == 0), 0)


def cut_batches(loader: DataLoader[Any], cut: int, *, split_among: int = 1) -> DataLoader[Any]:
    """Return the loader with each of its batches cut into `cut` batches of one size.

    The result is like a loader with the smaller batch size, except that `drop_last` still drops what the large batch
    size would drop. The end of a stream is not known before, so there only an incomplete small batch is dropped. A
    loader that does not shuffle is used for evaluation; if its batches cannot be cut, it is returned unchanged.

    Args:
        loader: the script's loader.
        cut: the number of smaller batches per batch.
        split_among: processes among which each batch is split; 1 if each process gets complete batches.

    Raises:
        LoopError: the loader does not read in sequence, so it is for training, and its batches cannot be cut.
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
            f"memory ran out before, so each batch of a loader is cut into {cut} micro-batches. This loader has "
            f"{'no stated batch size' if size is None else f'batch_size={size}'}, which cannot be cut.\n"
            f"Use a batch_size that is a multiple of {cut * split_among}, or a smaller batch_size."
        )
    smaller = size // cut
    if isinstance(loader.dataset, IterableDataset) or (type(batches) is BatchSampler and not batches.drop_last):
        cutter = BatchSampler(batches.sampler, smaller, batches.drop_last)
    else:
        cutter = CutBatchSampler(batches, smaller, cut)
    return with_batches(loader, cutter, batch_size=None if loader.batch_size is None else smaller)
