"""A request to stop: SIGTERM, noticed in place of ending at once.

SIGTERM to a process whose script runs in another thread than the first, which alone hears of signals.

Notices that this process is asked to stop, in place of stopping at once.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

from zero_plugin.errors import LoopError


class StopNote:
    """A handler of SIGTERM that notes it for who listens; where nobody does, it ends the process.

    Attributes:
        received: whether it has come.
        listened: whether somebody looks at `received`.
    """

    def __init__(self) -> None:
        self.received = False
        self.listened = False

    def __call__(self, number: int, _: FrameType | None) -> None:
        """Note the signal."""
        self.received = True
        if not self.listened:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def leave_stop_note() -> None:
    """Let SIGTERM be noted from now on; nothing outside the main thread."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, StopNote())


def find_stop_note() -> StopNote | None:
    """What SIGTERM is noted by in this process, None where it is not."""
    handler = signal.getsignal(signal.SIGTERM)
    return handler if isinstance(handler, StopNote) else None


class StopRequest:
    """SIGTERM, once it is listened for."""

    def __init__(self) -> None:
        self._listens = False
        self._before: Any = None
        self._note = StopNote()

    @property
    def received(self) -> bool:
        """Whether it has come."""
        return self._note.received

    def listen(self) -> None:
        """From now on SIGTERM is only noted, and handed on to the handler that the script has set before.

        Raises:
            LoopError: this is not the main thread.
        """
        if self._listens:
            return
        if threading.current_thread() is not threading.main_thread():
            if (note := find_stop_note()) is not None:  # the launcher's, for threads
                note.listened = True
                self._note = note
                return
            raise LoopError("stop_requested() waits for a signal, which only the main thread gets: call it there.")
        self._note.listened = True
        self._before = signal.signal(signal.SIGTERM, self._hear)
        self._listens = True

    def forget(self) -> None:
        """SIGTERM does again what it did before."""
        if self._note is find_stop_note():  # of a thread: the launcher's note stays, and ends the process again
            self._note.listened = False
        if self._listens and threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGTERM) == self._hear:
                signal.signal(signal.SIGTERM, self._before)
            self._listens = False

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._note(number, frame)
        if callable(self._before):
            self._before(number, frame)
