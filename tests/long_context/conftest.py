"""Runs this folder's checks in one group of processes, and tells each check's outcome."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# The checks import each other by name, and what is shared from tests/strategies, here and in the worker.
sys.path[:0] = [str(HERE), str(HERE.parent / "strategies")]


@pytest.fixture
def long_context_outcome(run_check: Callable[[Path, str, int, str], None]) -> Callable[[str, int, str], None]:
    """Fail unless check NAME of MODULE passed on each of WORLD processes."""
    return functools.partial(run_check, HERE / "worker.py")
