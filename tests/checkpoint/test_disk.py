"""Disks that are full, read-only, broken or not shared: every process is told, and nothing else has changed."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CHECKS: dict[str, tuple[str, dict[str, Any]]] = {
    "refusals": ("ddp", {}),
    "separate": ("zero2", {}),
    "full, without reserving": ("zero3", {"how": "full", "reserves": False}),
    "full, asynchronously": ("ddp", {"how": "full", "asynchronous": True}),
    "read-only": ("ddp", {"how": "read-only"}),
    "broken": ("zero2", {"how": "broken"}),
    "over quota": ("zero3", {"how": "over quota"}),
}
RARE = ("full, without reserving", "over quota")
STEPS = 300  # more than any check takes


@pytest.fixture(scope="module")
def whole_losses(forks: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[float]]:
    """What a training on a path gives that never saves."""

    @functools.cache
    def losses(path: str) -> list[float]:
        output = tmp_path_factory.mktemp("whole") / "losses"
        outcome = forks.run("disk_worker", 2, check="nothing", path=path, disk="", output=str(output), steps=STEPS)
        assert outcome.codes == [0, 0], outcome.logs
        return json.loads(output.read_text())

    return losses


@pytest.mark.processes
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.campaign] * (name in RARE)) for name in CHECKS])
def test_failing_disk(
    name: str, forks: Any, whole_losses: Callable[[str], list[float]], small_disk: Path, tmp_path: Path
) -> None:
    """Both processes raise the same error; older checkpoints and the training are as if nothing had been tried."""
    path, arguments = CHECKS[name]
    check, output = "failing" if "how" in arguments else name, tmp_path / "losses"
    outcome = forks.run("disk_worker", 2, check=check, path=path, disk=str(small_disk), output=str(output), **arguments)
    assert outcome.codes == [0, 0], outcome.logs
    losses = json.loads(output.read_text())
    assert 1 < len(losses) < STEPS
    assert losses == whole_losses(path)[: len(losses)]
