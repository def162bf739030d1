"""Shows this package's messages on standard error, unless the user has set up logging. Shows the progress of long work.

Every module logs to `logging.getLogger(__name__)`, below the logger `zero_plugin`. If the program has given this logger
or the root logger a handler, only that handler decides. Otherwise `show_messages` makes the messages visible.

Work that may take over two seconds runs inside `with working(…):`, which shows its progress: on a terminal as one line
that is redrawn and vanishes at the end, elsewhere as messages.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakKeyDictionary

from zero_plugin.config.amounts import show_bytes
from zero_plugin.errors import printable

# Set to 1, it puts the date and time before each message that `show_messages` shows.
TIMES_VARIABLE: Final = "ZERO_PLUGIN_LOG_TIMES"
# Set to 1, `show_messages` shows warnings and errors only; `launch --quiet` sets it for the workers.
QUIET_VARIABLE: Final = "ZERO_PLUGIN_QUIET"

# Set to 1, it shows details too; `launch --verbose` sets it for the workers.
VERBOSE_VARIABLE: Final = "ZERO_PLUGIN_VERBOSE"

_LOGGER: Final = logging.getLogger("zero_plugin")
# The `extra` of a message that needs no action: the default handler shows it only with VERBOSE_VARIABLE.
DETAIL: Final = {"detail": True}


_DONE: Final[WeakKeyDictionary[Any, set[Hashable]]] = WeakKeyDictionary()


def once(owner: object, key: Hashable) -> bool:
    """Return whether this is the first call with this object and key, for a message that is logged once.

        if once(self, "skips"):
            announce("a step was skipped")

    Args:
        owner: the object that the message is about. Only a weak reference is kept. For once in a process, the file's
            logger.
        key: a name of the message, or its text.
    """
    done = _DONE.setdefault(owner, set())
    is_first = key not in done
    done.add(key)
    return is_first


def is_set(variable: str) -> bool:
    """Return whether an environment variable is set as a switch: neither empty nor 0."""
    return os.environ.get(variable, "0") not in ("", "0")


def show_messages(
    *, quiet: bool = False, prefix: str = "zero_plugin: ", is_main: Callable[[], bool] | None = None
) -> None:
    """Show the messages of this package on standard error, unless the user has set up logging.

    The logger's level is set to INFO, or with `quiet` to WARNING, unless the user has set one. A second call replaces
    the settings of the first one.

    Args:
        quiet: show only warnings and errors, as on all processes of a run except the first.
        prefix: the text before each message.
        is_main: returns whether the calling thread is the run's first process. Only its messages below warnings are
            shown. For runs whose processes are threads; by default all threads count as the first process.
    """
    global _own_level
    if _LOGGER.level in (logging.NOTSET, _own_level):
        _own_level = logging.WARNING if quiet or is_set(QUIET_VARIABLE) else logging.INFO
        _LOGGER.setLevel(_own_level)
    if _user_handles_messages():
        return
    if (handler := _own_handler()) is None:
        handler = _StderrHandler()
        _LOGGER.addHandler(handler)
    handler.prefix = prefix
    handler.is_main = is_main


_own_level: int = logging.NOTSET  # the level that `show_messages` has set


def _user_handles_messages() -> bool:
    handlers = [*_LOGGER.handlers, *logging.getLogger().handlers]
    return any(not isinstance(handler, _StderrHandler) for handler in handlers)


class _StderrHandler(logging.Handler):
    """A handler that writes to the current `sys.stderr`, so a test's or a notebook's capture receives the messages."""

    prefix = ""
    is_main: Callable[[], bool] | None = None
    is_drawn = False  # whether the terminal's last line is one of `draw`

    def emit(self, record: logging.LogRecord) -> None:
        """Write one message, with its level if it is a warning or higher. Use colour on a terminal."""
        if sys.stderr is None or _user_handles_messages():  # the user set up logging after `show_messages`
            return
        # Progress messages come from a helper thread, for which `is_main` fails. `working` has checked it already.
        is_of_work = getattr(record, "work", False)
        if getattr(record, "detail", False) and not is_set(VERBOSE_VARIABLE):
            return
        if record.levelno < logging.WARNING and not is_of_work and self.is_main is not None and not self.is_main():
            return
        try:
            self.erase()
            self._write(record)
        except Exception:  # noqa: BLE001 - a message must not end the program; `logging.raiseExceptions` decides
            with suppress(ValueError):  # `handleError` writes to stderr too, which may be closed
                self.handleError(record)

    def _write(self, record: logging.LogRecord) -> None:
        level, style = "", ""
        if record.levelno >= logging.WARNING:
            level, style = ("error: ", "bold red") if record.levelno >= logging.ERROR else ("warning: ", "yellow")
        formatter = logging.Formatter()
        stamp = f"{formatter.formatTime(record)} " if is_set(TIMES_VARIABLE) else ""
        before, message = stamp + self.prefix, printable(formatter.format(record))
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.text import Text

            Console(file=sys.stderr).print(Text.assemble(before, (level, style), message), soft_wrap=True)
        else:
            sys.stderr.write(f"{before}{level}{message}\n")
            sys.stderr.flush()

    @property
    def draws(self) -> bool:
        """Whether a progress line can be drawn: on a terminal that is not dumb and that no other code draws on."""
        if sys.stderr is None or not sys.stderr.isatty() or _user_handles_messages():
            return False
        from rich.console import Console
        from rich.file_proxy import FileProxy  # replaces stderr while a live display of rich is on the terminal

        return not isinstance(sys.stderr, FileProxy) and not Console(file=sys.stderr).is_dumb_terminal

    def draw(self, text: str) -> None:
        """Draw a line over the previously drawn one. The cursor stays in the line."""
        from rich.console import Console
        from rich.text import Text

        console = Console(file=sys.stderr, highlight=False)
        line = Text(f"{self.prefix}{' '.join(printable(text).split())}", "dim")
        line.truncate(console.width - 1, overflow="ellipsis")
        with self._locked():
            self.erase()
            console.print(line, end="", soft_wrap=True)
            self.is_drawn = True

    def erase(self) -> None:
        """Erase the drawn line."""
        with self._locked():
            if self.is_drawn and sys.stderr is not None:
                sys.stderr.write("\r\x1b[2K")
                sys.stderr.flush()
            self.is_drawn = False

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.acquire()
        try:
            yield
        finally:
            self.release()


SILENT_S = 2.0  # shorter work shows nothing
LOG_EACH_S = 10.0  # between two log lines of the same work
_DRAW_EACH_S: Final = 0.25


@dataclass(slots=True, eq=False)
class Work:
    """One piece of work; see `working`.

    Attributes:
        what: a phrase, e.g. "saving checkpoint_3".
        total: the number of units; None if unknown.
        unit: name of the units; bytes are shown in larger units.
        live: whether a terminal shows a redrawn line instead of messages.
        done: units done so far.
    """

    what: str
    total: int | None
    unit: str
    live: bool
    done: int = 0
    begun: float = field(default_factory=time.monotonic)
    thread: int = field(default_factory=threading.get_ident)
    next_line: float = 0.0  # seconds after the beginning

    def advance(self, count: int = 1) -> None:
        """Count completed units."""
        self.done += count

    def describe(self, seconds: float, *, has_ended: bool = False) -> str:
        """Return one line that describes the progress after so many seconds."""
        parts = [f"done in {_show_seconds(seconds)}" if has_ended else _show_seconds(seconds)]
        knows_end = self.total is not None and 0 < self.done <= self.total
        if self.done:
            done = show_bytes(self.done) if self.unit == "bytes" else f"{self.done:,}"
            total = show_bytes(self.total or 0) if self.unit == "bytes" else f"{self.total or 0:,} {self.unit}"
            parts.append(f"{done} of {total}" if knows_end else done if self.unit == "bytes" else f"{done} {self.unit}")
        if knows_end and not has_ended and self.total is not None and self.done < self.total:
            parts.append(f"about {_show_seconds(seconds * (self.total - self.done) / self.done)} left")
        return f"{self.what}: {', '.join(parts)}"


def _show_seconds(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


@contextmanager
def working(what: str, total: int | None = None, *, unit: str = "bytes", live: bool = True) -> Iterator[Work]:
    """Show duration and progress of the work inside the context. Show nothing if it takes under two seconds.

    A terminal shows one line that vanishes at the end. Elsewhere, a message is logged every ten seconds and one at the
    end, which is a detail if the work took under ten seconds. Only the main process shows progress, and only if it is
    not quiet. For nested work, the inner one is shown. A thread draws, because a long call into torch cannot.

    Args:
        what: a phrase that begins with a participle, e.g. "saving checkpoint_3".
        total: the number of units, if known.
        unit: the unit that `Work.advance` counts.
        live: False for background work: the script may have its own line on the terminal, so messages are logged.

    Yields:
        The work; call its `advance` to report progress.
    """
    work = Work(what, total, unit, live, next_line=LOG_EACH_S)
    handler = _own_handler()
    if not _LOGGER.isEnabledFor(logging.INFO) or (handler and handler.is_main is not None and not handler.is_main()):
        yield work
        return
    _shown.begin(work)
    has_ended = False
    try:
        yield work
        has_ended = True
    finally:
        _shown.end(work, failed=not has_ended)


def _own_handler() -> _StderrHandler | None:
    return next((handler for handler in _LOGGER.handlers if isinstance(handler, _StderrHandler)), None)


class _ShownWork:
    """All current work, and the thread that shows it. The thread ends with the last work.

    A thread is needed because a call into DeepSpeed or a compiler cannot show its own progress. Processes that show
    nothing have no thread.

    Lock order: code that holds `_changed` may take the lock of a logging handler, never the other way round.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Reset the state in a forked child, which has neither the thread nor the work."""
        if (handler := _own_handler()) is not None:
            handler.is_drawn = False  # the parent process drew the line, and erases it
        self._changed = threading.Condition()
        self._going: list[Work] = []
        self._thread: threading.Thread | None = None

    def begin(self, work: Work) -> None:
        """Show this work from now on."""
        with self._changed:
            self._going.append(work)
            if self._thread is None:
                # A daemon thread does not keep an ending process alive.
                self._thread = threading.Thread(target=self._run, name="zero_plugin progress", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def end(self, work: Work, *, failed: bool) -> None:
        """Stop showing this work. After the return, no line of it is written."""
        with self._changed:
            if work not in self._going:  # the work was begun before a fork
                return
            self._going.remove(work)
            handler = _own_handler()
            if handler is not None:
                handler.erase()
            seconds = time.monotonic() - work.begun
            if seconds >= SILENT_S and not failed and _live_handler(work) is None:
                _log_work(work, seconds, has_ended=True, is_detail=seconds < LOG_EACH_S)
            thread = None
            if not self._going:
                thread, self._thread = self._thread, None
            self._changed.notify_all()
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        with self._changed:
            while self._thread is threading.current_thread():
                self._changed.wait(self._show())

    def _show(self) -> float:
        """Write the lines that are due. Return the seconds until the next line may be due."""
        now, wait = time.monotonic(), LOG_EACH_S
        inner: dict[int, Work] = {}  # thread → its innermost long work
        for work in self._going:
            if now - work.begun >= SILENT_S:
                inner[work.thread] = work
            else:
                wait = min(wait, SILENT_S - (now - work.begun))
        for work in inner.values():
            seconds = now - work.begun
            if (handler := _live_handler(work)) is not None:
                handler.draw(work.describe(seconds))
                wait = min(wait, _DRAW_EACH_S)
                continue
            if seconds >= work.next_line:
                work.next_line = seconds + LOG_EACH_S
                _log_work(work, seconds)
            wait = min(wait, work.next_line - seconds)
        return max(wait, 0.01)


def _live_handler(work: Work) -> _StderrHandler | None:
    """Return the handler that draws the line of this work; None if it is shown by messages."""
    handler = _own_handler()
    return handler if work.live and handler is not None and handler.draws else None


def _log_work(work: Work, seconds: float, *, has_ended: bool = False, is_detail: bool = False) -> None:
    _LOGGER.info("%s", work.describe(seconds, has_ended=has_ended), extra={"work": True, "detail": is_detail})


_shown: Final[Any] = _ShownWork()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_shown.forget)
