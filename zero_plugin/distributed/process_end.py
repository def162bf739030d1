"""Ends of a process: a stop request by SIGTERM, the exit together with all others, and errors that cannot be raised."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Final, NoReturn

from zero_plugin.errors import LoopError, ZeroPluginError

_log = logging.getLogger(__name__)


ENDING_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@contextmanager
def own_signals() -> Iterator[bool]:
    """Restore the handlers of all ending signals afterwards, since other code sets handlers and leaves them.

    Yields:
        Whether handlers can be set: only the main thread can set them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield False
        return
    before = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    try:
        yield True
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


class StopHandler:
    """A handler that records SIGTERM if some code listens for it, and otherwise ends the process.

    Only the main thread receives signals. If the launcher runs scripts in other threads, its main thread has installed
    this handler before.

    Attributes:
        received: whether SIGTERM was received.
        listened: whether some code reads `received`.
    """

    def __init__(self) -> None:
        self.received = False
        self.listened = False

    def __call__(self, number: int, _: FrameType | None) -> None:
        """Record the signal. End the process if no code listens."""
        self.received = True
        if not self.listened:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def install_stop_handler() -> None:
    """Install a `StopHandler` for SIGTERM. Do nothing outside the main thread."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, StopHandler())


def find_stop_handler() -> StopHandler | None:
    """Return the `StopHandler` of this process; None if none is installed."""
    handler = signal.getsignal(signal.SIGTERM)
    return handler if isinstance(handler, StopHandler) else None


class StopRequest:
    """A request to stop by SIGTERM, for code that listens for it."""

    def __init__(self) -> None:
        self._listens = False
        self._before: Any = None
        self._handler = StopHandler()

    @property
    def received(self) -> bool:
        """Whether SIGTERM was received."""
        return self._handler.received

    def listen(self) -> None:
        """Record SIGTERM from now on, without ending the process, and pass it to the script's previous handler.

        Raises:
            LoopError: this is not the main thread.
        """
        if self._listens:
            return
        if threading.current_thread() is not threading.main_thread():
            if (handler := find_stop_handler()) is not None:  # the launcher's, for threads
                handler.listened = True
                self._handler = handler
                return
            raise LoopError("stop_requested() waits for a signal, which only the main thread gets: call it there.")
        self._handler.listened = True
        self._before = signal.signal(signal.SIGTERM, self._hear)
        self._listens = True

    def forget(self) -> None:
        """Restore the previous effect of SIGTERM."""
        if self._handler is find_stop_handler():  # in a thread: the launcher's handler stays and ends the process again
            self._handler.listened = False
        if self._listens and threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGTERM) == self._hear:
                signal.signal(signal.SIGTERM, self._before)
            self._listens = False

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._handler(number, frame)
        if callable(self._before):
            self._before(number, frame)


_LAST_CALLS_S: Final = 10.0
_FLUSH_S: Final = 2.0
_last_calls: Final[list[weakref.WeakMethod[Callable[[], None]]]] = []


def call_before_end(method: Callable[[], None]) -> None:
    """Register a bound method to call before this process ends by an error.

    Only a weak reference is kept. The call may take up to ten seconds.
    """
    _last_calls[:] = [known for known in _last_calls if known() is not None]
    _last_calls.append(weakref.WeakMethod(method))


def make_last_calls() -> None:
    """Call the methods of `call_before_end` in parallel, and wait for at most ten seconds."""
    calls = [call for given in _last_calls if (call := given()) is not None]
    _last_calls.clear()
    run_in_threads(_LAST_CALLS_S, *calls)


def end_process(message: str) -> NoReturn:
    """End this process with exit code 1, from any thread, after its last calls."""
    _end_after(lambda: _log.error(message))


def flush_output() -> None:
    """Flush standard output and standard error. Ignore errors: a reader may have gone, or a script closed them."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def _end_after(report: Callable[[], None]) -> NoReturn:
    """End this process with exit code 1 after a report and its last calls, even if its output cannot be written."""

    def print_report() -> None:
        with suppress(Exception):
            report()

    try:
        # Write in threads, because a write blocks on a full pipe that no process reads.
        run_in_threads(_FLUSH_S, flush_output)  # first the script's own output
        run_in_threads(_LAST_CALLS_S, print_report)
        make_last_calls()
        run_in_threads(_FLUSH_S, flush_output)
    finally:
        os._exit(1)


_leaves = False


def is_at_exit() -> bool:
    """Return whether the script has ended and the exit functions run."""
    return _leaves


def run_in_threads(seconds: float, *calls: Callable[[], None]) -> bool:
    """Run each call in its own daemon thread, and wait for at most `seconds`.

    Returns:
        Whether all calls ended in that time, by returning or raising.
    """
    threads = [threading.Thread(target=call, name="zero_plugin call in time", daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def call_at_exit(end: Callable[[], None]) -> Callable[[], None]:
    """Call `end`, which is collective, when the process ends without an error. Return the function given to `atexit`.

    An error in `end` (another process has not ended, a background save or a tracker has failed) ends the process with
    exit code 1. Python's own handling would print the error and exit with 0.

    After an error of the script, `end` is not called, because the other processes would not reach its barrier; the
    launcher ends them. Only the calls of `call_before_end` are made.
    """

    own = os.getpid()

    def leave() -> None:
        global _leaves
        _leaves = True
        if os.getpid() != own:  # a fork of the script, which is not a process of the run
            return
        if getattr(sys, "last_exc", None) is None and getattr(sys, "last_value", None) is None:
            try:
                end()
            except BaseException as error:  # noqa: BLE001 - the outermost frame
                is_own = isinstance(error, ZeroPluginError)
                _end_after(functools.partial(_log.error if is_own else traceback.print_exception, error))
        else:
            make_last_calls()

    atexit.register(leave)
    return leave
