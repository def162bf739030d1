"""The end of a process that saves asynchronously. The rest is in tests/strategies/asynchronous_checks.py."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from zero_plugin.checkpoint.verify import find_damage

WORKER = Path(__file__).parent / "asynchronous_worker.py"


@pytest.mark.processes
def test_the_end_waits(run_processes: Callable[..., list[str]], tmp_path: Path) -> None:
    """A process waits for its save, even without end_training(). The checkpoint is complete and the exit code 0."""
    outputs = run_processes(WORKER, 2, tmp_path / "saved", "slow")
    assert all("the script has ended False" in output for output in outputs), outputs
    assert find_damage(tmp_path / "saved") is None


@pytest.mark.processes
def test_a_failure_at_the_end_is_told(tmp_path: Path) -> None:
    """A failed save logs a line that names the checkpoint, and changes the exit code."""
    command = [sys.executable, WORKER, tmp_path / "store", "0", "1", tmp_path / "saved", "full"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert run.returncode == 1, run.stderr
    last = run.stderr.splitlines()[-1]
    assert last.startswith(f"zero_plugin: error: saving {tmp_path / 'saved'} in the background: "), run.stderr
    assert "No space left" in last
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
