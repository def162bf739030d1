"""The logger: the process that logs a line, the order of lines, and their reported origin."""

from __future__ import annotations

import inspect
import logging
import os
import subprocess
import sys

import pytest

from zero_plugin.errors import LoopError
from zero_plugin.logging import get_logger
from zero_plugin.loop.state import PartialState


@pytest.fixture(autouse=True)
def _levels() -> None:
    """Restore the process's own root level."""
    before = logging.getLogger().level
    yield
    logging.getLogger().setLevel(before)


@pytest.fixture
def _state() -> None:
    """Start the processes: this one alone."""
    PartialState(cpu=True)
    yield
    PartialState().destroy_process_group()
    PartialState._reset_state()


def test_it_needs_the_processes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the rank is unknown: an error says what to write."""
    monkeypatch.setattr(PartialState, "_shared_state", {})
    with pytest.raises(LoopError, match=r"'early'.*\n.*PartialState\(\)"):
        get_logger("early").warning("a line")


@pytest.mark.usefixtures("_state")
def test_a_line_comes_from_its_caller(caplog: pytest.LogCaptureFixture) -> None:
    """File, line and function are the script's, for any method."""
    logger = get_logger(__name__, log_level="info")
    line = inspect.currentframe().f_lineno
    logger.info("a %s", "line")
    logger.log(logging.WARNING, "two")
    logger.warning_once("three", main_process_only=False)
    logger.error("four", in_order=True)
    assert caplog.messages == [f"[RANK 0] {text}" for text in ("a line", "two", "three", "four")]
    assert [record.lineno - line for record in caplog.records] == [1, 2, 3, 4]
    assert {record.funcName for record in caplog.records} == {"test_a_line_comes_from_its_caller"}


@pytest.mark.usefixtures("_state")
def test_a_warning_once(caplog: pytest.LogCaptureFixture) -> None:
    """The same message with the same arguments appears once, also with unhashable arguments."""
    logger = get_logger(__name__)
    for argument in ([1], [1], [2]):
        logger.warning_once("found %s", argument)
    assert caplog.messages == ["[RANK 0] found [1]", "[RANK 0] found [2]"]


@pytest.mark.usefixtures("_state")
def test_the_level(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument wins, then the environment, then logging's level. A line below the level is not formatted."""

    class Unprintable:
        def __str__(self) -> str:
            raise AssertionError

    logger = get_logger("levels", log_level="ERROR")
    logger.warning(Unprintable())
    logger.error("heard")
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "debug")
    get_logger("levels").debug("heard too")
    assert caplog.messages == ["[RANK 0] heard", "[RANK 0] heard too"]


@pytest.mark.processes
def test_several_processes(run_processes, lines_of) -> None:
    """The main process, all, or all in order log. A process whose level drops a line blocks no other one."""
    outputs = run_processes(__file__, 2)
    assert [list(lines_of(output.splitlines())) for output in outputs] == [
        ["[RANK 0] main", "[RANK 0] all", "[RANK 0] turn 0"],
        ["[RANK 1] all", "[RANK 1] turn 1"],
    ]


def test_importing_it_is_not_importing_python_s() -> None:
    """A script may import this module by its name together with Python's."""
    code = "import logging, zero_plugin.logging as own; assert own.get_logger and logging.getLogger"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


if __name__ == "__main__":
    store, rank, world = sys.argv[1:]
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    logging.basicConfig(stream=sys.stdout, format="%(message)s", level="INFO")
    PartialState(cpu=True, init_method=f"file://{store}")
    logger = get_logger(__name__)
    logger.info("main")
    logger.info("all", main_process_only=False)
    logger.info(f"turn {rank}", in_order=True)
    logger.setLevel("INFO" if rank == "0" else "ERROR")
    logger.debug("nobody", in_order=True)
    logger.warning("only one would take turns", in_order=True, main_process_only=False) if rank == "2" else None
