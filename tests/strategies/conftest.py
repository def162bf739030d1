"""Runs this folder's checks in one group of processes, and tells each check's outcome."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # the checks import each other by name, here and in the worker


@pytest.fixture
def outcome(run_check: Callable[[Path, str, int, str], None]) -> Callable[[str, int, str], None]:
    """Fail unless check NAME of MODULE passed on each of WORLD processes."""
    return functools.partial(run_check, HERE / "check_worker.py")
