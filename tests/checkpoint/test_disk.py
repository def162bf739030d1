"""Disks that are full, read-only, broken or not shared: every process is told, and nothing else has changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

CHECKS: dict[str, tuple[str, dict[str, Any]]] = {
    "refusals": ("ddp", {}),
    "separate": ("zero2", {}),
    "full": ("zero2", {"how": "full"}),
    "full, without reserving": ("zero3", {"how": "full", "reserves": False}),
    "full, asynchronously": ("ddp", {"how": "full", "asynchronous": True}),
    "read-only": ("ddp", {"how": "read-only"}),
    "broken": ("zero3", {"how": "broken"}),
}


@pytest.mark.processes
@pytest.mark.parametrize("name", CHECKS)
def test_failing_disk(name: str, forks: Any, small_disk: Path, tmp_path: Path) -> None:
    """Both processes raise the same error; older checkpoints and the training are as if nothing had been tried."""
    path, arguments = CHECKS[name]
    check = "failing" if "how" in arguments else name
    told = {"path": path, "disk": str(small_disk)}
    outcome = forks.run("disk_worker", 2, check=check, output=str(tmp_path / "losses"), **told, **arguments)
    assert outcome.codes == [0, 0], outcome.logs
    losses = json.loads((tmp_path / "losses").read_text())
    assert losses
    outcome = forks.run("disk_worker", 2, check="nothing", output=str(tmp_path / "whole"), steps=len(losses), **told)
    assert outcome.codes == [0, 0], outcome.logs
    assert losses == json.loads((tmp_path / "whole").read_text())
