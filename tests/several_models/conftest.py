"""Runs this folder's checks in one group of processes per number of processes, and tells each one's outcome."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# The checks import each other by name, and what is trained from tests/strategies, here and in the worker.
sys.path[:0] = [str(HERE), str(HERE.parent / "strategies")]


@pytest.fixture(scope="session")
def several_finished() -> dict[int, Path]:
    """The folder of each number of processes that has run."""
    return {}


@pytest.fixture
def several_outcome(
    run_processes: Callable[..., list[str]],
    chosen_checks: Callable[[Path, int], list[str]],
    several_finished: dict[int, Path],
    tmp_path_factory: pytest.TempPathFactory,
    built_ops: None,
) -> Callable[[str, int, str], None]:
    """Fail unless check NAME of MODULE passed on each of WORLD processes; all that are asked for run once, together."""

    def outcome(module: str, world: int, name: str) -> None:
        if world not in several_finished:
            several_finished[world] = folder = tmp_path_factory.mktemp(f"several-{world}")
            checks = ",".join(chosen_checks(HERE, world))
            run_processes(HERE / "worker.py", world, checks, folder)
        outcomes = [json.loads(file.read_text()) for file in sorted(several_finished[world].glob("rank-*.json"))]
        assert len(outcomes) == world, "the processes of these checks did not run to their end"
        found = [outcome[f"{module}.{name}"] for outcome in outcomes]
        failures = [f"--- process {rank}\n{text}" for rank, text in enumerate(found) if text != "ok"]
        assert not failures, "\n".join(failures)

    return outcome
