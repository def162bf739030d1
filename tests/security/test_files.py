"""Paths that are no regular files (a pipe, a device, a link cycle) are errors immediately."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zero_plugin.config.amounts import read_bytes, read_count
from zero_plugin.machine.hardware import PROC, process_stat, read_text


@pytest.mark.parametrize("kind", ["pipe", "circle", "device", "folder"])
def test_check_does_not_wait_for_what_is_no_file(kind: str, tmp_path: Path) -> None:
    """The check rejects the file without waiting and without a traceback."""
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


def test_a_pipe_of_the_shell_is_read() -> None:
    """A shell's `<(…)` is a pipe without a name in the file system, and is read."""
    script = f"{sys.executable} -m zero_plugin check <(sleep 0.5; echo 'zero_stage: 9')"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, ":1:1: error: zero_stage" in done.stdout) == (2, True), done


def test_processes_whose_names_are_no_utf8() -> None:
    """Process names may be invalid UTF-8, and the launcher can still read all processes to report a failure."""
    rename = "import ctypes, sys; ctypes.CDLL(None).prctl(15, b'\\xff\\x1b'); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", rename]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            assert process_stat(process.pid)[0] in "RS"
            assert read_text(PROC / str(process.pid) / "comm") == "\ufffd\x1b"
        finally:
            process.communicate(b"")


@pytest.mark.parametrize("amount", ["9" * 400, "9" * 5000, f"{'9' * 400}GB", "9e999GB", f"{'9' * 400}B"])
def test_numbers_of_hundreds_of_digits(amount: str) -> None:
    """Numbers of hundreds of digits are refused as amounts."""
    assert read_bytes(amount) is None
    assert read_count(amount) is None
    assert read_count(10**400) is None
