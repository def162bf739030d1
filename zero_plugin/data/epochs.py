"""Count a loader's epochs, and tell them to whatever of it wants to know."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["Epochs"]


class Epochs:
    """The epochs of a loader.

    What has a `set_epoch` is told the epoch that the loop sets. A loop that sets none gets the next one at each start,
    so that shuffling differs from epoch to epoch; what the user told by himself, on the object, is left as it is.

    Args:
        parts: the data set, the batch sampler, the sampler, …

    Attributes:
        current: the running epoch; -1 before the first.
    """

    def __init__(self, parts: Iterable[Any]) -> None:
        self.current = -1
        self._chosen: int | None = None
        self.follow(parts)

    def follow(self, parts: Iterable[Any]) -> None:
        """Tell these from now on, and no others."""
        self._parts = [part for part in parts if hasattr(part, "set_epoch")]
        self._seen: list[int | None] = []  # of each part, at the last start
        if self._chosen is not None:
            self.choose(self._chosen)

    def choose(self, epoch: int) -> None:
        """The coming start begins this one."""
        self._chosen = epoch
        for part in self._parts:
            part.set_epoch(epoch)

    def begin(self) -> None:
        """An epoch starts."""
        self.current = self.current + 1 if self._chosen is None else self._chosen
        if self._chosen is None:
            for part, seen in zip(self._parts, self._seen, strict=False):
                if seen is not None and _epoch_of(part) == seen:
                    part.set_epoch(self.current)
        self._chosen = None
        self._seen = [_epoch_of(part) for part in self._parts]

    def told(self, part: Any) -> int | None:
        """The epoch that `part` stands at; None where it does not count them."""
        if not any(part is known for known in self._parts):
            return None
        epoch = _epoch_of(part)
        return self.current if epoch is None else epoch


def _epoch_of(part: Any) -> int | None:
    epoch = getattr(part, "epoch", None)
    return epoch if isinstance(epoch, int) else None
