"""The test that a line counts for, if tests/mutants records the lines that each test runs."""

from __future__ import annotations

import sys


def enter_context(name: str) -> None:
    """Count the lines that this process runs from now on for `name`, if coverage.py records them."""
    coverage = sys.modules.get("coverage")
    recording = coverage and coverage.Coverage.current()
    if recording:
        recording.switch_context(name)
