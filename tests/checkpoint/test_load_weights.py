"""Weights that are read straight into models of every kind: the checks of `loading_checks`, on one process and two."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.extend(str(HERE.parent / folder) for folder in ("checkpoint", "strategies"))
from loading_checks import CHECKS  # noqa: E402

CASES = [(world, name) for name, (worlds, _) in CHECKS.items() for world in worlds]


@pytest.fixture(scope="module")
def finished() -> dict[int, Path]:
    """The folder of the outcomes, of each number of processes that has run."""
    return {}


@pytest.mark.processes
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("world", "name"), CASES)
def test_check(
    world: int,
    name: str,
    finished: dict[int, Path],
    run_processes: Callable[..., list[str]],
    tmp_path_factory: pytest.TempPathFactory,
    built_ops: None,
) -> None:
    """The check holds on every process; its docstring says what it holds."""
    if name == "pretrained":
        try:
            version("transformers")
        except PackageNotFoundError:
            pytest.skip("pip install 'zero-plugin[dev]': transformers is not installed")
    if world not in finished:
        finished[world] = folder = tmp_path_factory.mktemp(f"loading-{world}")
        run_processes(HERE / "loading_worker.py", world, "loading_checks", folder)
    outcomes = [json.loads(f.read_text())[f"loading_checks.{name}"] for f in sorted(finished[world].glob("rank-*"))]
    assert len(outcomes) == world, "the processes of these checks did not run to their end"
    failures = [f"--- process {rank}\n{text}" for rank, text in enumerate(outcomes) if text != "ok"]
    assert not failures, "\n".join(failures)
