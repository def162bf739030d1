"""SIGTERM to a process whose script runs in another thread than the first, which alone hears of signals."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

__all__ = ["StopNote", "find_stop_note", "leave_stop_note"]


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
