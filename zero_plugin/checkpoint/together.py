"""Steps that every process takes, and that fail on all of them where they fail on one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from zero_plugin import collectives
from zero_plugin.errors import CheckpointError, ZeroPluginError

__all__ = ["all_or_none", "on_main", "taken_out"]

T = TypeVar("T")


def all_or_none(step: Callable[[], T]) -> T:
    """Run `step`, which waits for no other process; what it returns here. Collective.

    Raises:
        CheckpointError: on every process, with the first failing one's message; that process raises its own error.
    """
    error: Exception | None = None
    try:
        result = step()
    except Exception as caught:  # noqa: BLE001 - raised below, when no process waits for this one any more
        error = caught
    messages = collectives.gather_object([None if error is None else _describe(error)])
    if error is not None:
        raise error
    failed = [(rank, message) for rank, message in enumerate(messages) if message is not None]
    if failed:
        raise CheckpointError(f"process {failed[0][0]}: {failed[0][1]}")
    return result


def on_main(step: Callable[[], T]) -> T:
    """Run `step` on the main process; what it returned, on every process. Collective; raises as `all_or_none`."""
    is_main = collectives.process_index() == 0
    outcome = [all_or_none(lambda: step() if is_main else None)]
    result: T = collectives.broadcast_object_list(outcome)[0]
    return result


def taken_out(all_of: Sequence[Any], left: Sequence[Any]) -> list[int]:
    """Places of the items that are in `left` no more, as the main process sees it. Collective."""
    gone = [index for index, item in enumerate(all_of) if not any(item is other for other in left)]
    places: list[int] = collectives.broadcast_object_list([gone])[0]
    return places


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, ZeroPluginError) else f"{type(error).__name__}: {error}"
