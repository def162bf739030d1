"""Where this package's messages appear: on standard error, unless the user has set up logging.

Every module logs to `logging.getLogger(__name__)`, below the logger `zero_plugin`. A program that has given that logger
or the root logger a handler decides by itself what is shown; in any other, `show_messages` makes the messages visible.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Final

# Set to 1, it puts the date and time before each message that `show_messages` shows.
TIMES_VARIABLE: Final = "ZERO_PLUGIN_LOG_TIMES"

_LOGGER: Final = logging.getLogger("zero_plugin")


def show_messages(
    *, quiet: bool = False, prefix: str = "zero_plugin: ", is_main: Callable[[], bool] | None = None
) -> None:
    """Show the messages of this package on standard error, unless the user has set up logging.

    The logger's level is set to INFO, or with `quiet` to WARNING, where the user has set none. A second call changes
    what the first one set.

    Args:
        quiet: let warnings and errors pass only, as all processes of a run but the first do.
        prefix: the text before each message.
        is_main: whether the calling thread is the run's first process, whose messages below warnings are shown; for
            processes that are threads. By default all threads are.
    """
    if _LOGGER.level in (logging.NOTSET, _own_level):
        _set_level(logging.WARNING if quiet else logging.INFO)
    if _user_handles_messages():
        return
    handler = next((handler for handler in _LOGGER.handlers if isinstance(handler, _StderrHandler)), None)
    if handler is None:
        handler = _StderrHandler()
        _LOGGER.addHandler(handler)
    handler.prefix = prefix
    handler.is_main = is_main


_own_level: int = logging.NOTSET  # what `show_messages` has set


def _set_level(level: int) -> None:
    global _own_level
    _own_level = level
    _LOGGER.setLevel(level)


def _user_handles_messages() -> bool:
    handlers = [*_LOGGER.handlers, *logging.getLogger().handlers]
    return any(not isinstance(handler, _StderrHandler) for handler in handlers)


class _StderrHandler(logging.Handler):
    """Writes to what `sys.stderr` is at that moment, so that a test's or a notebook's capture receives it."""

    prefix = ""
    is_main: Callable[[], bool] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write one message, with its level from a warning on; in colour on a terminal."""
        if sys.stderr is None or _user_handles_messages():  # logging was set up after `show_messages`
            return
        if record.levelno < logging.WARNING and self.is_main is not None and not self.is_main():
            return
        try:
            self._write(record)
        except Exception:  # noqa: BLE001 - a message must not end the program; `logging.raiseExceptions` decides
            self.handleError(record)

    def _write(self, record: logging.LogRecord) -> None:
        level, style = "", ""
        if record.levelno >= logging.WARNING:
            level, style = ("error: ", "bold red") if record.levelno >= logging.ERROR else ("warning: ", "yellow")
        formatter = logging.Formatter()
        time = f"{formatter.formatTime(record)} " if os.environ.get(TIMES_VARIABLE, "0") not in ("", "0") else ""
        before, message = time + self.prefix, formatter.format(record)
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.text import Text

            Console(file=sys.stderr).print(Text.assemble(before, (level, style), message), soft_wrap=True)
        else:
            sys.stderr.write(f"{before}{level}{message}\n")
            sys.stderr.flush()
