"""Files that are none: a pipe, a device, links in a circle are errors at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zero_plugin.config.amounts import read_bytes, read_count


@pytest.mark.parametrize("kind", ["pipe", "circle", "device", "folder"])
def test_check_does_not_wait_for_what_is_no_file(kind: str, tmp_path: Path) -> None:
    """Nor does it fail with a traceback."""
    file = tmp_path / "a.yaml"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "circle":
        file.symlink_to(file)
    elif kind == "folder":
        (tmp_path / "b").mkdir()
        file.symlink_to(tmp_path / "b")
    else:
        file.symlink_to("/dev/zero")
    command = [sys.executable, "-m", "zero_plugin", "check", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr
    assert f"{file}: error: " in done.stdout


@pytest.mark.parametrize("amount", ["9" * 400, "9" * 5000, f"{'9' * 400}GB", "9e999GB", f"{'9' * 400}B"])
def test_numbers_of_hundreds_of_digits(amount: str) -> None:
    """Are no amounts."""
    assert read_bytes(amount) is None
    assert read_count(amount) is None
    assert read_count(10**400) is None
