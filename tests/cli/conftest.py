"""Shared fixtures of the command tests."""

import logging
import sys
from collections.abc import Callable, Iterator

import pytest

from zero_plugin.cli.main import main
from zero_plugin.distributed import messages


@pytest.fixture(autouse=True)
def messages_as_before() -> Iterator[None]:
    """Restore the message handlers after each test, because a command in this process replaces them."""
    logger = logging.getLogger("zero_plugin")
    before = {handler: dict(vars(handler)) for handler in logger.handlers}
    level, own_level = logger.level, messages._own_level
    yield
    logger.handlers[:] = before
    for handler, attributes in before.items():
        vars(handler).clear()
        vars(handler).update(attributes)
    logger.setLevel(level)
    messages._own_level = own_level


@pytest.fixture
def run_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run `zero-plugin …` in this process. Return exit code, output, and errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["zero-plugin", *arguments])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run
