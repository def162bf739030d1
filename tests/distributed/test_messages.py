"""What `show_messages` writes to standard error, and when it leaves messages to the user's own logging."""

import io
import logging
import os
import pty
import re
import sys
from contextlib import contextmanager

import pytest

from zero_plugin.distributed.messages import show_messages


@contextmanager
def without_handlers():
    """The loggers of a program that has not set up logging; pytest puts handlers of its own on the root logger."""
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


def log_each_level():
    """One message at each level, from a module of the package."""
    logger = logging.getLogger("zero_plugin.launch.engine")
    for level in ("debug", "info", "warning", "error"):
        getattr(logger, level)("a %s", level)


@without_handlers()
def test_the_level_is_written_from_a_warning_on(capsys):
    """Messages follow the prefix; warnings and errors name their level, and debug messages are left out."""
    show_messages()
    log_each_level()
    assert (
        capsys.readouterr().err == "zero_plugin: a info\nzero_plugin: warning: a warning\nzero_plugin: error: a error\n"
    )


@without_handlers()
def test_quiet_leaves_warnings_and_errors(capsys):
    """`quiet` is a level; a second call changes it and adds no second handler."""
    show_messages()
    show_messages(quiet=True, prefix="")
    log_each_level()
    assert capsys.readouterr().err == "warning: a warning\nerror: a error\n"


@without_handlers()
def test_a_level_that_the_user_set_stays(capsys):
    """INFO is set only where the logger has no level."""
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
    """On a terminal the level is in colour; the message is never broken, so that it can be copied."""
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
