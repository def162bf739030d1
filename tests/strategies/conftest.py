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
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Path]:
    """The folders of the groups that have run."""
    return {}


@pytest.fixture
def outcome(
    run_processes: Callable[..., list[str]],
    finished: dict[tuple[str, int], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, int, str], None]:
    """Fail unless the check NAME of a module passed on every one of WORLD processes; its processes run once for all."""

    def outcome(module: str, world: int, name: str) -> None:
        if (module, world) not in finished:
            finished[module, world] = folder = tmp_path_factory.mktemp(f"{module}-{world}")
            run_processes(HERE / "check_worker.py", world, module, folder, seconds=280)
        folder = finished[module, world]
        outcomes = [json.loads(file.read_text()) for file in sorted(folder.glob("rank-*.json"))]
        assert len(outcomes) == world, "the processes of these checks did not run to their end"
        failures = [f"--- process {rank}\n{found[name]}" for rank, found in enumerate(outcomes) if found[name] != "ok"]
        assert not failures, "\n".join(failures)

    return outcome
