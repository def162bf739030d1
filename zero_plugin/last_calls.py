"""What is done before an error ends this process, in bounded time: trackers are finished, a save is completed."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final, NoReturn

__all__ = ["call_before_end", "end_process", "make_last_calls", "print_line", "within"]

_LAST_CALLS_S: Final = 10.0
_last_calls: Final[list[weakref.WeakMethod[Callable[[], None]]]] = []


def call_before_end(method: Callable[[], None]) -> None:
    """Have a bound method called before this process ends by an error; it is not kept alive, and may take seconds."""
    _last_calls[:] = [known for known in _last_calls if known() is not None]
    _last_calls.append(weakref.WeakMethod(method))


def make_last_calls() -> None:
    """Call what was given to `call_before_end`, at the same time, and wait for ten seconds at most."""
    calls = [call for given in _last_calls if (call := given()) is not None]
    _last_calls.clear()
    within(_LAST_CALLS_S, *calls)


def end_process(message: str) -> NoReturn:
    """End this process with exit code 1, from any thread, after its last calls."""
    print_line(f"error: {message}")
    make_last_calls()
    sys.stdout.flush()
    os._exit(1)


def within(seconds: float, *calls: Callable[[], None]) -> bool:
    """Whether all calls returned in time, each in a thread of its own."""
    threads = [threading.Thread(target=call, name="zero_plugin call in time", daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def print_line(line: str) -> None:
    """Print a line of this package, on whichever process calls it."""
    print(f"zero_plugin: {line}", file=sys.stderr, flush=True)  # noqa: T201 - before any logging is set up
