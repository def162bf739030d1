"""`Epochs`: counts the epochs of a loader, and passes the number to `set_epoch` of the loader's parts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Epochs:
    """The epochs of a loader.

    Parts with a `set_epoch` get the epoch that the loop sets. In a loop that sets none, they get the next epoch at each
    start, and shuffling differs from epoch to epoch. An epoch that the user has set directly on a part is not changed.

    Args:
        parts: the dataset, the batch sampler, the sampler, …

    Attributes:
        current: the running epoch; -1 before the first.
        chosen: the epoch of the next start, if set since the last start.
    """

    def __init__(self, parts: Iterable[Any]) -> None:
        self.current = -1
        self.chosen: int | None = None
        self.follow(parts)

    def follow(self, parts: Iterable[Any]) -> None:
        """Pass epochs to these parts only, from now on."""
        self._parts = [part for part in parts if hasattr(part, "set_epoch")]
        self._seen: list[int | None] = []  # the `epoch` of each part at the last start
        if self.chosen is not None:
            self.choose(self.chosen)

    def choose(self, epoch: int, *, by_loop: bool = True) -> None:
        """Set the epoch of the next start.

        Args:
            epoch: the number of the epoch.
            by_loop: whether the loop set it. If False, call `set_epoch` only of parts with an `epoch`, as each start
                does.
        """
        self.chosen = epoch
        for part in self._parts:
            if by_loop or _epoch_of(part) is not None:
                part.set_epoch(epoch)

    def begin(self) -> None:
        """Start an epoch."""
        self.current = self.current + 1 if self.chosen is None else self.chosen
        if self.chosen is None:
            for part, seen in zip(self._parts, self._seen, strict=False):
                # If the part's `epoch` has changed since the last start, the user has set it: leave it.
                if seen is not None and _epoch_of(part) == seen:
                    part.set_epoch(self.current)
        self.chosen = None
        self._seen = [_epoch_of(part) for part in self._parts]

    def of(self, part: Any) -> int | None:
        """Return the epoch of `part`; None if the part has no `set_epoch`."""
        if not any(part is known for known in self._parts):
            return None
        epoch = _epoch_of(part)
        return self.current if epoch is None else epoch


def _epoch_of(part: Any) -> int | None:
    epoch = getattr(part, "epoch", None)
    return epoch if isinstance(epoch, int) else None
