"""Runs a module of checks in one group of processes, and tells each check's outcome."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # the checks import each other by name, here and in the worker


@pytest.fixture(scope="session")
def finished() -> dict[int, Path]:
    """The folder of each number of processes that has run."""
    return {}


@pytest.fixture
def outcome(
    run_processes: Callable[..., list[str]],
    chosen_checks: Callable[[Path, int], list[str]],
    finished: dict[int, Path],
    tmp_path_factory: pytest.TempPathFactory,
    built_ops: None,
) -> Callable[[str, int, str], None]:
    """Fail unless check NAME of MODULE passed on each of WORLD processes; all that are asked for run once, together."""

    def outcome(module: str, world: int, name: str) -> None:
        if world not in finished:
            finished[world] = folder = tmp_path_factory.mktemp(f"checks-{world}")
            checks = ",".join(chosen_checks(HERE, world))
            run_processes(HERE / "check_worker.py", world, checks, folder)
        outcomes = [json.loads(file.read_text()) for file in sorted(finished[world].glob("rank-*.json"))]
        assert len(outcomes) == world, "the processes of these checks did not run to their end"
        found = [outcome[f"{module}.{name}"] for outcome in outcomes]
        failures = [f"--- process {rank}\n{text}" for rank, text in enumerate(found) if text != "ok"]
        assert not failures, "\n".join(failures)

    return outcome
