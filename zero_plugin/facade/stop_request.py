"""Notices that this process is asked to stop, in place of stopping at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from zero_plugin.errors import LoopError
from zero_plugin.stop_note import StopNote, find_stop_note

__all__ = ["StopRequest"]


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
