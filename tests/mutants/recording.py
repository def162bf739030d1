"""A pytest plugin that makes coverage.py separate the lines of each test, and records the results.

`lines.record` uses this plugin, and names the output folder in an environment variable.
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
    """Return the test to which lines are attributed.

    Cases that share their processes enter the contexts that parity/worker.py names.
    """
    params = getattr(item, "callspec", None) and item.callspec.params  # type: ignore[attr-defined]
    if params and {"device", "path", "name"} <= params.keys():
        return f"{params['name']} on {params['device']} {params['path']}"
    return item.nodeid


def _node_of(item: pytest.Item) -> str:
    """Return the id by which pytest selects a test, without pytest-xdist's group."""
    mark = item.get_closest_marker("xdist_group")
    return item.nodeid.removesuffix(f"@{mark.args[0]}") if mark else item.nodeid


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Attribute the lines of pytest's own process."""
    enter_context(item.nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record the worst result of setup, call and teardown."""
    if report.when == "setup" or report.outcome != "passed":
        _ended[report.nodeid] = report.outcome


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the tests that this pytest process has run."""
    enter_context("")
    ran = [
        {
            "node": _node_of(item),
            "item": item.nodeid,
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
