"""A table of the cases tried against the package and their results, at the end of pytest's output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

_NAME = "tried"
_COLUMNS = ("tried", "ended in time", "right message", "lost", "slowest s")


@pytest.fixture
def tried(request: pytest.FixtureRequest) -> Callable[[str], dict[str, Any]]:
    """Return the row of one kind, to count up during a test. So the table has a failing test's findings too."""

    def add(kind: str, count: int = 0) -> dict[str, Any]:
        row: dict[str, Any] = {"kind": kind, **dict.fromkeys(_COLUMNS, 0), "tried": count}
        request.node.user_properties.append((_NAME, row))
        return row

    return add


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the rows of all tests, with rows of one kind merged."""
    table: dict[str, dict[str, Any]] = {}
    reports = [report for found in terminalreporter.stats.values() for report in found]
    for report in reports:
        if getattr(report, "when", "") != "call":
            continue
        for name, row in report.user_properties:
            if name == _NAME:
                total = table.setdefault(row["kind"], dict.fromkeys(_COLUMNS, 0))
                for column in _COLUMNS:
                    join = max if column == "slowest s" else sum
                    total[column] = join((total[column], row[column]))
    if not table:
        return
    width = max(map(len, table))
    terminalreporter.section("what was tried")
    terminalreporter.write_line(f"{'kind':{width}}  " + "  ".join(f"{column:>13}" for column in _COLUMNS))
    for kind, total in sorted(table.items()):
        cells = (f"{total[column]:13.0f}" if column == "slowest s" else f"{total[column]:13}" for column in _COLUMNS)
        terminalreporter.write_line(f"{kind:{width}}  " + "  ".join(cells))
