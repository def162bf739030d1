"""Share the samples of an iterable data set among the processes by skipping the others' samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import cycle, islice
from typing import Any

from zero_plugin.data.batches import Sharing
from zero_plugin.data.portion import Portion

__all__ = ["CountingCollate", "StreamShard"]


class StreamShard:
    """An iterable data set's samples for one process, each with whether it is real.

    Of every world × batch_size samples of the stream, process r takes the r-th batch_size. The end of the stream is
    completed from its beginning (`even`), left out (`drop_last`), or dealt out as far as it goes. A loader's worker has
    a copy of the data set, as in plain torch: what a worker reads is shared like a stream of its own.

    Attributes:
        dataset: the user's data set.
    """

    def __init__(self, dataset: Iterable[Any], how: Sharing) -> None:
        self.dataset = dataset
        self._how = how

    def __iter__(self) -> Iterator[tuple[Any, bool]]:
        how = self._how
        assert how.batch_size is not None
        size = how.world * how.batch_size
        own = slice(how.rank * how.batch_size, (how.rank + 1) * how.batch_size)
        stream = ((sample, True) for sample in self.dataset)
        first: list[tuple[Any, bool]] = []
        while step := list(islice(stream, size)):
            first = first or [(sample, False) for sample, _ in step]
            if len(step) < size:
                if how.drop_last:
                    return
                if how.even and how.world > 1:
                    step += islice(cycle(first), size - len(step))
            yield from step[own]

    def count_batches(self) -> int:
        """Steps in an epoch, where the data set knows its length; TypeError where it does not."""
        how = self._how
        assert how.batch_size is not None
        full, tail = divmod(len(self.dataset), how.world * how.batch_size)  # type: ignore[arg-type]  # TypeError is meant
        needed = 1 if how.even else (how.world - 1) * how.batch_size + 1  # below it, some process has nothing
        return full + (tail >= needed and not how.drop_last)


class CountingCollate:
    """The user's collate function, for samples that come with whether they are real.

    It makes a `Portion`, so that the counts travel with the batch through worker processes and pinning.
    """

    def __init__(self, collate: Callable[[Any], Any], batched: bool) -> None:
        self._collate = collate
        self._batched = batched  # False: each sample of the stream is a batch by itself

    def __call__(self, flagged: Any) -> Portion:
        """Collate pairs of a sample and whether it is real; one pair where the loader does not batch."""
        if not self._batched:
            sample, real = flagged
            return Portion(self._collate(sample), None, None if real else 0)
        return Portion(self._collate([sample for sample, _ in flagged]), len(flagged), sum(real for _, real in flagged))
