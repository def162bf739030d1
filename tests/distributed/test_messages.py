"""What `show_messages` and `working` write to standard error, and when the user's own logging takes over."""

import io
import logging
import os
import pty
import re
import subprocess
import sys
import threading
import time
import weakref
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from zero_plugin.distributed import messages
from zero_plugin.distributed.messages import once, show_messages, working


@contextmanager
def without_handlers():
    """Remove all handlers, as in a program without logging setup. pytest adds some to the root logger."""
    loggers = [logging.getLogger(), logging.getLogger("zero_plugin")]
    before = [(logger.handlers, logger.level) for logger in loggers]
    for logger in loggers:
        logger.handlers = []
    loggers[1].setLevel(logging.NOTSET)
    try:
        yield
    finally:
        for logger, (handlers, level) in zip(loggers, before, strict=True):
            logger.handlers = handlers
            logger.setLevel(level)


def test_once_is_by_object_and_key():
    """A message appears once per object and key. A new object repeats it, and a used object can be freed."""
    first, second = threading.Event(), threading.Event()
    assert [once(first, "a"), once(first, "a"), once(first, "b"), once(second, "a")] == [True, False, True, True]
    freed = weakref.ref(first)
    del first
    assert freed() is None


def log_each_level():
    """Log one message at each level, from a module of the package."""
    logger = logging.getLogger("zero_plugin.launch.engine")
    for level in ("debug", "info", "warning", "error"):
        getattr(logger, level)("a %s", level)


@without_handlers()
def test_the_level_is_written_from_a_warning_on(capsys):
    """Messages follow the prefix. Warnings and errors name their level, and debug messages are left out."""
    show_messages()
    log_each_level()
    assert (
        capsys.readouterr().err == "zero_plugin: a info\nzero_plugin: warning: a warning\nzero_plugin: error: a error\n"
    )


@without_handlers()
def test_quiet_leaves_warnings_and_errors(capsys):
    """`quiet` is a level. A second call changes it and adds no second handler."""
    show_messages()
    show_messages(quiet=True, prefix="")
    log_each_level()
    assert capsys.readouterr().err == "warning: a warning\nerror: a error\n"


@without_handlers()
def test_a_level_that_the_user_set_stays(capsys):
    """INFO is set only if the logger has no level."""
    logging.getLogger("zero_plugin").setLevel(logging.ERROR)
    show_messages()
    log_each_level()
    assert capsys.readouterr().err == "zero_plugin: error: a error\n"


@pytest.mark.parametrize("name", ["", "zero_plugin"])
@pytest.mark.parametrize("before", [True, False])
@without_handlers()
def test_logging_that_the_user_set_up_receives_the_messages_alone(capsys, name, before):
    """With a handler on the root logger or on `zero_plugin`, set up before or after, a message appears once."""
    stream = io.StringIO()
    for step in (0, 1):
        if (step == 0) is before:
            logging.getLogger(name or None).addHandler(logging.StreamHandler(stream))
        else:
            show_messages()
    logging.getLogger("zero_plugin.launch").warning("once")
    assert stream.getvalue() == "once\n"
    assert capsys.readouterr().err == ""


@without_handlers()
def test_standard_error_is_looked_up_when_a_message_is_written(monkeypatch):
    """A capture that begins after `show_messages` receives the messages."""
    show_messages()
    monkeypatch.setattr(sys, "stderr", later := io.StringIO())
    log_each_level()
    assert later.getvalue().startswith("zero_plugin: a info\n")


@without_handlers()
def test_times_on_request(capsys, monkeypatch):
    """`ZERO_PLUGIN_LOG_TIMES=1` puts the time before each message."""
    monkeypatch.setenv("ZERO_PLUGIN_LOG_TIMES", "1")
    show_messages()
    log_each_level()
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} zero_plugin: a info\n", capsys.readouterr().err)


@without_handlers()
def test_colour_on_a_terminal(monkeypatch):
    """On a terminal the level is coloured. The message is never wrapped, so it can be copied."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        show_messages()
        logging.getLogger("zero_plugin").error("a long line [with brackets] " * 10)
        written = os.read(leader, 10_000).decode()
    os.close(leader)
    assert written.startswith("zero_plugin: \x1b[1;31merror: \x1b[0ma long line [with brackets]")
    assert written.count("\n") == 1


def wait_until(done):
    """Wait until the condition is true, or the test's time limit ends it."""
    while not done():
        time.sleep(0.01)


def progress_threads():
    return [thread for thread in threading.enumerate() if thread.name == "zero_plugin progress"]


@contextmanager
def terminal(monkeypatch):
    """Make standard error a terminal of 60 columns. Return a function that reads all output so far."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    leader, follower = pty.openpty()
    os.set_blocking(leader, False)
    written = ""

    def read():
        nonlocal written
        with suppress(BlockingIOError):
            written += os.read(leader, 100_000).decode()
        return written

    with os.fdopen(follower, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        yield read
    os.close(leader)


@pytest.fixture
def _soon(monkeypatch):
    monkeypatch.setattr(messages, "SILENT_S", 0.05)
    monkeypatch.setattr(messages, "LOG_EACH_S", 0.1)


@without_handlers()
def test_short_work_is_silent(capsys):
    """Work shorter than the threshold prints nothing, and no thread is left."""
    show_messages()
    with working("saving a", 10) as work:
        work.advance(10)
    assert capsys.readouterr().err == ""
    assert not progress_threads()


@pytest.mark.usefixtures("_soon")
@without_handlers()
def test_long_work_is_logged_now_and_then_and_at_its_end(monkeypatch):
    """Without a terminal, each line has time, amount done, total and rest. A line marks the end, none follows."""
    monkeypatch.setattr(sys, "stderr", shown := io.StringIO())
    show_messages()
    with working("saving a", 4, unit="files") as work:
        wait_until(lambda: "saving a: " in shown.getvalue())
        work.advance()
        wait_until(lambda: re.search(r"saving a: \d+ s, 1 of 4 files, about \d+ s left\n", shown.getvalue()))
    assert re.search(r"saving a: done in \d+ s, 1 of 4 files\n$", shown.getvalue())
    assert not progress_threads()


def test_the_page_shows_the_lines_of_a_long_save():
    """docs/training.md prints the log's lines after 20 s and at the end."""
    gib = 2**30
    work = messages.Work("saving checkpoint_3", int(48.9 * gib), "bytes", live=False, done=int(31.2 * gib))
    first = work.describe(20)
    work.done = work.total
    page = Path(__file__).parents[2] / "docs/training.md"
    shown = f"```text\nzero_plugin: {first}\nzero_plugin: {work.describe(32, has_ended=True)}\n```"
    assert shown in page.read_text(encoding="utf-8")


@pytest.mark.usefixtures("_soon")
@without_handlers()
def test_inner_work_is_shown_in_place_of_the_outer(monkeypatch):
    """Inner work is shown instead of the outer as soon as it is long itself. Then the outer work returns."""
    monkeypatch.setattr(sys, "stderr", shown := io.StringIO())
    show_messages()
    with working("outer"):
        with working("inner"):
            wait_until(lambda: shown.getvalue().count("inner: ") >= 2)
        so_far = len(shown.getvalue())
        wait_until(lambda: "outer: " in shown.getvalue()[so_far:])
    of_inner = shown.getvalue()[:so_far]
    assert "outer" not in of_inner[of_inner.index("inner: ") :]


@pytest.mark.usefixtures("_soon")
@without_handlers()
def test_work_that_fails_leaves_its_error_alone(monkeypatch):
    """Work that fails prints no line about its end, and nothing after it."""
    monkeypatch.setattr(sys, "stderr", shown := io.StringIO())
    show_messages()

    def fail():
        wait_until(lambda: "saving a: " in shown.getvalue())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), working("saving a"):
        fail()
    assert "done" not in shown.getvalue()
    assert not progress_threads()


@pytest.mark.usefixtures("_soon")
@pytest.mark.parametrize("how", ["quiet", "no main process"])
@without_handlers()
def test_nobody_else_shows_work(monkeypatch, how):
    """A quiet run, and any process but the main one, shows no work and starts no thread for it."""
    monkeypatch.setattr(sys, "stderr", shown := io.StringIO())
    monkeypatch.setenv(messages.QUIET_VARIABLE, "1" if how == "quiet" else "0")
    show_messages(is_main=(lambda: False) if how != "quiet" else None)
    with working("saving a"):
        assert not progress_threads()
        time.sleep(0.2)
    assert shown.getvalue() == ""


@pytest.mark.usefixtures("_soon")
@without_handlers()
def test_the_users_logging_receives_work(caplog, monkeypatch):
    """With a user's handler, progress lines are messages like all others, also on a terminal."""
    stream = io.StringIO()
    show_messages()
    logging.getLogger("zero_plugin").addHandler(logging.StreamHandler(stream))
    with terminal(monkeypatch) as read:
        with working("saving a"):
            wait_until(lambda: "saving a: " in stream.getvalue())
        assert read() == ""


@pytest.mark.usefixtures("_soon")
@without_handlers()
def test_a_terminal_has_one_line_that_vanishes(monkeypatch):
    """The line is overwritten, cut to the width, gives way to messages, and leaves no trace."""
    with terminal(monkeypatch) as read:
        show_messages()
        with working("saving " + "a" * 100):
            wait_until(lambda: "saving a" in read())
            logging.getLogger("zero_plugin").info("between")
            so_far = len(read())
            wait_until(lambda: "saving a" in read()[so_far:])
        written = read()
    lines = re.sub(r"\x1b\[\d*m", "", written).replace("\r\n", "\n")
    shown = lines.split("\r\x1b[2K")
    assert "zero_plugin: between\n" in "".join(shown)
    assert all(len(part.split("\n")[-1]) < 60 for part in shown)
    assert lines.endswith("\r\x1b[2K")
    assert "done in" not in lines


@pytest.mark.usefixtures("_soon")
@without_handlers()
def test_under_a_live_display_of_rich_lines_go_above_it(monkeypatch):
    """Under rich's live display lines are printed above it, since two drawers would tear each other's line."""
    from rich.console import Console
    from rich.live import Live

    with terminal(monkeypatch) as read:
        show_messages()
        with Live("bar", console=Console(file=sys.stderr), auto_refresh=False), working("saving a"):
            wait_until(lambda: "saving a: " in read())
        written = read()
    assert "done in" in written


FORK = """
import os, sys, time
from zero_plugin.distributed import messages
messages.SILENT_S = messages.LOG_EACH_S = 0.05
messages.show_messages()
with messages.working("parent"):
    time.sleep(0.2)
    child = os.fork()
    if not child:
        with messages.working("child"):
            time.sleep(0.2)
        sys.exit()  # through the parent's work
    assert os.waitpid(child, 0)[1] == 0
    how = sys.argv[1]
    if how == "exit":
        sys.exit(3)
    os._exit(3)
"""


@pytest.mark.parametrize("how", ["exit", "at once"])
def test_forks_and_exits_in_the_midst_of_work(how):
    """A fork shows only its own work, and no thread keeps a process alive or blocks its end."""
    done = subprocess.run([sys.executable, "-c", FORK, how], capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert "zero_plugin: child: done in 0 s\n" in done.stderr
    assert "parent: done" not in done.stderr
    assert "parent: 0 s\n" in done.stderr
