"""A process that must end does so, whatever the state of its output."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import pytest

from zero_plugin.distributed import process_end
from zero_plugin.distributed.messages import show_messages
from zero_plugin.distributed.process_end import call_at_exit, call_before_end, end_process
from zero_plugin.errors import LoopError


def fail() -> None:
    raise LoopError("mistake")


def end_in_a_thread() -> None:
    """End the process from a thread, like the collective check, while the script waits in a call."""
    threading.Thread(target=end_process, args=("mistake",)).start()
    time.sleep(60)


def end_at_exit() -> None:
    call_at_exit(fail)
    atexit._run_exitfuncs()


def fill(pipe: TextIO) -> None:
    """Write more than an unread pipe holds, from a thread, which then holds the stream's lock."""
    threading.Thread(target=pipe.write, args=("x" * 10_000_000,), daemon=True).start()
    time.sleep(0.2)


# What a script does to its output, and whether its message reaches standard error.
BREAKS: dict[str, tuple[Callable[[], object], bool]] = {
    "a reader that has gone": (lambda: None, True),
    "stdout closed": (lambda: sys.stdout.close(), True),
    "no stdout": (lambda: setattr(sys, "stdout", None), True),
    "stderr closed": (lambda: sys.stderr.close(), False),
    "no stderr": (lambda: setattr(sys, "stderr", None), False),
    "both closed": (lambda: (sys.stdout.close(), sys.stderr.close()), False),
    "a full pipe": (lambda: fill(sys.stdout), True),
    "a full pipe for both": (lambda: (os.dup2(1, 2), fill(sys.stderr)), False),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("end", [end_in_a_thread, end_at_exit])
@pytest.mark.parametrize("breaks", BREAKS)
def test_output_that_cannot_be_written_keeps_no_process(breaks: str, end: Callable[[], None], tmp_path: Path) -> None:
    """The exit code is 1, the last calls are made, and the message reaches standard error if that is writable."""
    change, is_read = BREAKS[breaks]
    finished, errors = tmp_path / "finished", tmp_path / "errors"
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            _become_a_script(writing, errors)
            os.close(reading)
            os.close(writing)
            tracker = Tracker(finished)
            call_before_end(tracker.finish)
            sys.stdout.write("printed")
            change()
            end()
        finally:
            os._exit(3)
    os.close(writing)
    if breaks == "a reader that has gone":
        os.close(reading)
    deadline = time.monotonic() + 40
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended[0] == 0:
        os.kill(child, 9)
        os.waitpid(child, 0)
    if breaks != "a reader that has gone":
        os.close(reading)
    assert ended[0] == child, f"it did not end: {errors.read_text()}"
    assert os.waitstatus_to_exitcode(ended[1]) == 1, errors.read_text()
    assert finished.exists()
    assert ("zero_plugin: error: mistake" in errors.read_text()) == is_read


class Tracker:
    """A tracker that leaves a file when it is finished."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def finish(self) -> None:
        self._file.touch()


def _become_a_script(writing: int, errors: Path) -> None:
    """Give this fork of pytest a script's output, and remove all that pytest registered."""
    os.dup2(writing, 1)
    os.dup2(os.open(errors, os.O_CREAT | os.O_WRONLY), 2)
    sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
    atexit._clear()
    process_end._last_calls.clear()
    process_end._LAST_CALLS_S = process_end._FLUSH_S = 0.5  # type: ignore[misc]
    for logger in (logging.getLogger(), logging.getLogger("zero_plugin")):
        logger.handlers = []
    show_messages()
