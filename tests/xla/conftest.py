"""Shared fixtures of XLA tests: each case is a separate process with a time limit, on PJRT's CPU client."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def run_case(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a case of `cases.py` to its end. Return its output."""

    def run(name: str, *, seconds: float = 240, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(HERE / "cases.py"), name, str(tmp_path)]
        runs = {"ZERO_PLUGIN_RUNS": str(tmp_path / "runs"), "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
        options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": seconds}
        return subprocess.run(command, env={**os.environ, **runs, **variables}, **options)

    return run
