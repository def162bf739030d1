"""The epochs of a loader: which one runs, and which parts of the loader hear of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Epochs:
    """The epochs of a loader.

    What has a `set_epoch` gets the epoch that the loop sets. A loop that sets none gets the next one at each start,
    so that shuffling differs from epoch to epoch; what the user has set by himself, on the object, is left as it is.

    Args:
        parts: the dataset, the batch sampler, the sampler, …

    Attributes:
        current: the running epoch; -1 before the first.
        chosen: the epoch that the coming start begins, where one was set since the last start.
    """

    def __init__(self, parts: Iterable[Any]) -> None:
        self.current = -1
        self.chosen: int | None = None
        self.follow(parts)

    def follow(self, parts: Iterable[Any]) -> None:
        """Tell these from now on, and no others."""
        self._parts = [part for part in parts if hasattr(part, "set_epoch")]
        self._seen: list[int | None] = []  # of each part, at the last start
        if self.chosen is not None:
            self.choose(self.chosen)

    def choose(self, epoch: int, *, by_loop: bool = True) -> None:
        """The coming start begins this one.

        Args:
            epoch: which.
            by_loop: else `set_epoch` is called only of what shows its `epoch`, as at each start.
        """
        self.chosen = epoch
        for part in self._parts:
            if by_loop or _epoch_of(part) is not None:
                part.set_epoch(epoch)

    def begin(self) -> None:
        """An epoch starts."""
        self.current = self.current + 1 if self.chosen is None else self.chosen
        if self.chosen is None:
            for part, seen in zip(self._parts, self._seen, strict=False):
                if seen is not None and _epoch_of(part) == seen:
                    part.set_epoch(self.current)
        self.chosen = None
        self._seen = [_epoch_of(part) for part in self._parts]

    def of(self, part: Any) -> int | None:
        """The epoch that `part` is at; None where it does not count them."""
        if not any(part is known for known in self._parts):
            return None
        epoch = _epoch_of(part)
        return self.current if epoch is None else epoch


def _epoch_of(part: Any) -> int | None:
    epoch = getattr(part, "epoch", None)
    return epoch if isinstance(epoch, int) else None
