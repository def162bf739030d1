"""Op builds: built, not built, stale locks, and a build that fails for want of a compiler."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from zero_plugin.cli.doctor_software import check_builds, check_locks, missing_builds
from zero_plugin.machine.op_builds import build_folder


def test_what_is_built_is_seen(tmp_path: Path) -> None:
    """By the library; a folder without it was begun and not ended."""
    for op in ("cpu_adam", "async_io"):
        (tmp_path / op).mkdir()
    (tmp_path / "cpu_adam" / "cpu_adam.so").touch()
    assert missing_builds(["cpu_adam", "async_io", "cpu_lion"], tmp_path) == ["async_io", "cpu_lion"]
    found = {f.check: f for f in check_builds(["cpu_adam", "async_io"], tmp_path, {}, build=False)}
    assert found["op cpu_adam"].level == "ok"
    assert found["op async_io"].level == "warning"
    assert "doctor --build" in found["op async_io"].fix
    assert [f.level for f in check_builds([], tmp_path, {}, build=False)] == ["ok"]


def test_the_folder_is_torchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's own builder names it, with and without TORCH_EXTENSIONS_DIR."""
    import torch
    from torch.utils.cpp_extension import _get_build_directory

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "own"))
    assert build_folder(os.environ, torch.version.cuda) / "op" == Path(_get_build_directory("op", False))
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert build_folder(os.environ, torch.version.cuda) / "op" == Path(_get_build_directory("op", False))


def test_stale_locks(tmp_path: Path) -> None:
    """The fix removes every one of them."""
    assert check_locks([]).level == "ok"
    locks = [tmp_path / op / "lock" for op in ("a", "b")]
    found = check_locks(locks)
    assert found.level == "wrong"
    assert found.fix == f"rm {locks[0]} {locks[1]}"


@pytest.mark.processes
def test_a_build_that_fails_shows_why(tmp_path: Path) -> None:
    """With neither compiler nor ninja on the PATH, the real build fails, and its own words are shown."""
    environ = {**os.environ, "PATH": str(tmp_path), "TORCH_EXTENSIONS_DIR": str(tmp_path), "DS_ACCELERATOR": "cpu"}
    (found,) = check_builds(["cpu_lion"], tmp_path, environ, build=True)
    assert found.level == "wrong"
    assert "ninja" in found.found.lower()
    assert found.fix.startswith(f"{sys.executable} -m zero_plugin.strategies.deepspeed.build_op cpu_lion")


BROKEN = """#!/bin/sh
case "$1" in
--version | -v) echo "c++ (GCC) 12.2.0" ;;
*) echo "cc1plus: fatal error: immintrin.h: No such file or directory" >&2; exit 1 ;;
esac
"""


@pytest.mark.campaign
def test_a_compiler_that_lacks_a_header(tmp_path: Path) -> None:
    """Its errors are shown, without the command lines and the traceback around them."""
    compiler = tmp_path / "c++"
    compiler.write_text(BROKEN)
    compiler.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "TORCH_EXTENSIONS_DIR": str(tmp_path), "DS_ACCELERATOR": "cpu"}
    (found,) = check_builds(["cpu_lion"], tmp_path, environ, build=True)
    assert found.level == "wrong"
    assert "immintrin.h" in found.found
    assert len(found.found.splitlines()) < 10
    assert all(len(line) < 300 for line in found.found.splitlines())


@pytest.mark.campaign
@pytest.mark.timeout(1200)  # a compiler on a busy machine
def test_a_build_that_works(tmp_path: Path) -> None:
    """The smallest op, from nothing; a second look finds it."""
    environ = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path), "DS_ACCELERATOR": "cpu"}
    assert [f.level for f in check_builds(["cpu_lion"], tmp_path, environ, build=True)] == ["ok"]
    assert missing_builds(["cpu_lion"], tmp_path) == []
