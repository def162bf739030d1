"""A request to stop: SIGTERM, recorded in place of ending at once.

Signals reach the main thread alone. Where the launcher runs scripts in other threads, its main thread has installed the
handler before.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

from zero_plugin.errors import LoopError


class StopHandler:
    """A handler of SIGTERM that records it for who listens; where nobody does, it ends the process.

    Attributes:
        received: whether it has come.
        listened: whether somebody looks at `received`.
    """

    def __init__(self) -> None:
        self.received = False
        self.listened = False

    def __call__(self, number: int, _: FrameType | None) -> None:
        """Record the signal."""
        self.received = True
        if not self.listened:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def install_stop_handler() -> None:
    """Have SIGTERM recorded from now on; nothing happens outside the main thread."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, StopHandler())


def find_stop_handler() -> StopHandler | None:
    """What records SIGTERM in this process; None where nothing does."""
    handler = signal.getsignal(signal.SIGTERM)
    return handler if isinstance(handler, StopHandler) else None


class StopRequest:
    """SIGTERM, once it is listened for."""

    def __init__(self) -> None:
        self._listens = False
        self._before: Any = None
        self._handler = StopHandler()

    @property
    def received(self) -> bool:
        """Whether it has come."""
        return self._handler.received

    def listen(self) -> None:
        """From now on SIGTERM is only recorded, and handed on to the handler that the script has set before.

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
        """SIGTERM does again what it did before."""
        if self._handler is find_stop_handler():  # of a thread: the launcher's stays, and ends the process again
            self._handler.listened = False
        if self._listens and threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGTERM) == self._hear:
                signal.signal(signal.SIGTERM, self._before)
            self._listens = False

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._handler(number, frame)
        if callable(self._before):
            self._before(number, frame)
