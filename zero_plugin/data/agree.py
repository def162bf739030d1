"""Streams of the processes end together, though nobody knows beforehand where."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from zero_plugin.collectives import gather_object, start_sum
from zero_plugin.data.portion import Portion
from zero_plugin.errors import LoopError

__all__ = ["keep_together"]


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
