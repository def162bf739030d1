"""Which test a line counts for, where tests/mutants records the lines that each test runs."""

from __future__ import annotations

import sys


def enter_context(name: str) -> None:
    """Have the lines that this process runs from now on count for `name`, if coverage.py records them."""
    coverage = sys.modules.get("coverage")
    recording = coverage and coverage.Coverage.current()
    if recording:
        recording.switch_context(name)
