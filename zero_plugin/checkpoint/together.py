"""Steps that every process takes, and that fail on all of them where they fail on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from zero_plugin import collectives
from zero_plugin.errors import CheckpointError, ZeroPluginError

__all__ = ["all_or_none", "on_main"]

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


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, ZeroPluginError) else f"{type(error).__name__}: {error}"
