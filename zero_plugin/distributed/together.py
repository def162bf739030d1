"""Steps that all ranks take or none, and what is logged once for all of them.

Steps that every process takes, and that fail on all of them where they fail on one.

Says a line once for the whole run.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

from torch import Tensor

from zero_plugin.distributed import collectives
from zero_plugin.distributed.collectives import num_processes, process_index
from zero_plugin.errors import CheckpointError, ZeroPluginError

_log = logging.getLogger(__name__)

T = TypeVar("T")

_FULL: Final = ". Make room there, or use another disk."
_CURES: Final = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EROFS: ". Systems also turn a disk read-only after an error of its own: `dmesg` tells.",
}


class Peers(Protocol):
    """All processes, as one thread of each reaches them; its calls are collective."""

    @property
    def is_main(self) -> bool:
        """Whether this is process 0."""

    def gather(self, text: str | None) -> list[str | None]:
        """Every process' text, process 0's first."""

    def sum(self, numbers: Tensor) -> Tensor:
        """The sum of all processes' tensors, which have one shape and dtype."""


class _Script:
    """See `SCRIPT`."""

    @property
    def is_main(self) -> bool:
        return collectives.process_index() == 0

    def gather(self, text: str | None) -> list[str | None]:
        return collectives.gather_object([text])

    def sum(self, numbers: Tensor) -> Tensor:
        total: Tensor = collectives.reduce(numbers, "sum")
        return total


SCRIPT: Final[Peers] = _Script()  # the script's own thread, over the group that it trains with


def all_or_none(step: Callable[[], T], peers: Peers = SCRIPT) -> T:
    """Run `step`, which waits for no other process; what it returns here. Collective.

    Raises:
        CheckpointError: on every process, with the first failing one's message. That process raises its own error,
            unless it is the system's, which is told as a CheckpointError there too.
    """
    error: Exception | None = None
    try:
        result = step()
    except Exception as caught:  # noqa: BLE001 - raised below, when no process waits for this one any more
        error = caught
    messages = peers.gather(None if error is None else describe_error(error))
    if isinstance(error, OSError):
        raise CheckpointError(describe_error(error)) from error
    if error is not None:
        raise error
    failed = [(rank, message) for rank, message in enumerate(messages) if message is not None]
    if failed:
        raise CheckpointError(f"process {failed[0][0]}: {failed[0][1]}")
    return result


def on_main(step: Callable[[], T]) -> T:
    """Run `step` on the main process; what it returned, on every process. Collective; raises as `all_or_none`."""
    outcome = [all_or_none(lambda: step() if SCRIPT.is_main else None)]
    result: T = collectives.broadcast_object_list(outcome)[0]
    return result


def taken_out(all_of: Sequence[Any], left: Sequence[Any]) -> list[int]:
    """Places of the items that are in `left` no more, as the main process sees it. Collective."""
    gone = [index for index, item in enumerate(all_of) if not any(item is other for other in left)]
    places: list[int] = collectives.broadcast_object_list([gone])[0]
    return places


def describe_error(error: Exception) -> str:
    """An error in a sentence for people: this package's messages say it all, others need their kind."""
    if isinstance(error, OSError) and error.errno:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{os.strerror(error.errno)}{_CURES.get(error.errno, '.')}"
    return str(error) if isinstance(error, ZeroPluginError) else f"{type(error).__name__}: {error}"


def announce(line: str, *, by_each: bool = False) -> None:
    """Log a warning on the main process only, or by each process that comes here, with its rank."""
    rank = process_index()
    if by_each and num_processes() > 1:
        line = f"process {rank}: {line}"
    if by_each or rank == 0:
        _log.warning(line)
