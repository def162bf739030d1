"""Say once what a loader's epochs leave out or repeat."""

from __future__ import annotations

from zero_plugin.announce import announce
from zero_plugin.data.batches import Sharing

__all__ = ["DropReport", "RestartReport"]


class DropReport:
    """Called with the number of samples that all processes leave out at an epoch's end; process 0 says it once.

    Args:
        how: how the loader is shared.
        is_least: whether the number is what is known, and more may be left out.
    """

    def __init__(self, how: Sharing, *, is_least: bool = False) -> None:
        self._how = how
        self._is_least = is_least
        self._told = False

    def __call__(self, samples: int) -> None:
        """Say it, the first time."""
        if not self._told and self._how.rank == 0:
            self._told = True
            what = "samples" if self._how.batched else "batches"
            least = "at least " if self._is_least else ""
            announce(
                f"{what} left out: {least}{samples} at the end of each epoch, so that all {self._how.world} processes "
                "stop together; even_batches: true repeats samples instead"
            )


class RestartReport:
    """Called with the number of steps after which this process's part of the data begins again; says it once."""

    def __init__(self) -> None:
        self._told = False

    def __call__(self, steps: int) -> None:
        """Say it, the first time."""
        if not self._told:
            self._told = True
            announce(
                f"this process's part of the data ended after {steps} batches, before another's; it begins again, and "
                "gather_for_metrics leaves the repeats out. even_batches: false stops all at the shortest",
                by_each=True,
            )
