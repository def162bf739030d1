"""A plugin of pytest that has coverage.py tell the lines of each test apart, and writes down how the tests ended.

It is for `lines.record`, which names the folder of what it writes in an environment variable.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from line_contexts import enter_context

FOLDER = "ZERO_PLUGIN_TESTS_RECORDING"
_ended: dict[str, str] = {}


def context_of(item: pytest.Item) -> str:
    """What the lines of a test count for.

    Checks and cases that share their processes enter the contexts that check_worker.py and parity/worker.py name.
    """
    params = getattr(item, "callspec", None) and item.callspec.params  # type: ignore[attr-defined]
    if params and {"module", "name"} <= params.keys():
        return f"{params['module']}.{params['name']} on {params.get('world', 2)}"
    if params and {"device", "path", "name"} <= params.keys():
        return f"{params['name']} on {params['device']} {params['path']}"
    return item.nodeid


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Lines of pytest's own process."""
    enter_context(item.nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """The worst of setup, call and teardown."""
    if report.when == "setup" or report.outcome != "passed":
        _ended[report.nodeid] = report.outcome


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Each process of pytest's writes the tests that it has run."""
    enter_context("")
    ran = [
        {
            "node": item.nodeid,
            "context": context_of(item),
            "passed": _ended[item.nodeid] == "passed",
            "daily": item.get_closest_marker("campaign") is None,
            "processes": item.get_closest_marker("processes") is not None,
        }
        for item in session.items
        if item.nodeid in _ended
    ]
    if ran:
        Path(os.environ[FOLDER], f"tests-{os.getpid()}.json").write_text(json.dumps(ran))
