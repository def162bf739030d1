"""Share batches, as lists of indices or samples, among the processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any, NamedTuple

from zero_plugin.errors import LoopError

__all__ = ["Share", "Sharing", "share_batches"]


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
        cut: into how many batches each of the user's was cut before.
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
    batches: Iterable[list[Any]], how: Sharing, report_dropped: Callable[[int], None] | None
) -> Iterator[Share]:
    """This process's shares, one per step.

    At step k the processes' shares, in the order of ranks, are the batches k·world … (k+1)·world-1 of `batches`, or
    with `split` the pieces of batch k. Only the last step can be incomplete. It is then completed from the epoch's
    first samples (`even`), or left out on every process where some process would have nothing (`report_dropped` gets
    the number of samples lost, unless `drop_last` asked for it). Without `report_dropped` each process goes on as far
    as its own shares reach, and the first ones may have one more than the last.

    Raises:
        LoopError: with `split`, a batch that is not the last does not hold world × batch_size samples.
    """
    steps = _cut(batches, how) if how.split else _deal(batches, how.world)
    step = next(steps, None)
    first = step
    while step is not None:
        # Whether it is the last matters only where it is incomplete, and the batches may depend on when they are drawn.
        is_full = _is_full(step, how)
        following = None if is_full else next(steps, None)
        if len(step) > how.world or (following is not None and len(step) < how.world):
            raise LoopError(
                f"split_batches: the batch sampler gave {sum(map(len, step))} samples; every batch but the last must "
                f"hold {how.world} × {how.batch_size}. Use split_batches=False with batches of varying size"
            )
        if following is None and not is_full and how.even and not how.drop_last:
            assert first is not None
            yield _complete(step, first, how)
        elif len(step) == how.world or (how.rank < len(step) and report_dropped is None and not how.drop_last):
            own = step[how.rank]
            yield Share(own, len(own), len(own))
        elif not how.drop_last and report_dropped is not None:
            report_dropped(sum(map(len, step)))
        step = next(steps, None) if is_full else following


def _is_full(step: list[list[Any]], how: Sharing) -> bool:
    """Whether every process surely has its share of it as it is."""
    if len(step) != how.world:
        return False
    return not how.even or how.drop_last or all(len(batch) == (how.batch_size or len(batch)) for batch in step)


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
