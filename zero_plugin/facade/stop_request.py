"""Notices that this process is asked to stop, in place of stopping at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from zero_plugin.errors import LoopError

__all__ = ["StopRequest"]


class StopRequest:
    """SIGTERM, once it is listened for.

    Attributes:
        received: whether it has come.
    """

    def __init__(self) -> None:
        self.received = False
        self._listens = False
        self._before: Any = None

    def listen(self) -> None:
        """From now on SIGTERM is only noted, and handed on to the handler that the script has set before.

        Raises:
            LoopError: this is not the main thread.
        """
        if self._listens:
            return
        if threading.current_thread() is not threading.main_thread():
            raise LoopError("stop_requested() waits for a signal, which only the main thread gets: call it there.")
        self._before = signal.signal(signal.SIGTERM, self._note)
        self._listens = True

    def forget(self) -> None:
        """SIGTERM does again what it did before."""
        if self._listens and threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGTERM) == self._note:
                signal.signal(signal.SIGTERM, self._before)
            self._listens = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        if callable(self._before):
            self._before(number, frame)
