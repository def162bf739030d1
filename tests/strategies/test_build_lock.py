"""A killed build's lock is an error before anything waits on it; a running build's is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zero_plugin.errors import MachineError
from zero_plugin.strategies.deepspeed.build_lock import refuse_stale_build_locks


@pytest.fixture(params=["op", "py311_cpu/op"])
def lock(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lock as torch's builder leaves it, with and without torch's folder per Python version."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / request.param / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    return lock


def test_a_stale_lock_is_refused(lock: Path) -> None:
    """The error names the lock and the command that removes it; after that there is nothing to refuse."""
    with pytest.raises(MachineError) as caught:
        refuse_stale_build_locks()
    assert f"rm {lock}" in str(caught.value)
    lock.unlink()
    refuse_stale_build_locks()


def test_a_live_builders_lock_is_respected(lock: Path) -> None:
    """While a process has the lock open, the run may wait for it; once that process is killed, it may not."""
    hold = "import os, sys; os.open(sys.argv[1], os.O_RDWR); print(flush=True); sys.stdin.read()"
    builder = subprocess.Popen(
        [sys.executable, "-c", hold, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ}
    )
    try:
        assert builder.stdout is not None
        builder.stdout.readline()
        refuse_stale_build_locks()
    finally:
        builder.kill()
        builder.communicate()
    with pytest.raises(MachineError):
        refuse_stale_build_locks()


def test_without_a_cache_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder, no lock."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "missing"))
    refuse_stale_build_locks()


INIT = """
from zero_plugin import Accelerator
accelerator = Accelerator(config={"zero_optimization": {"stage": 3}})
with accelerator.init_model():
    pass
"""


def test_a_model_that_is_built_in_partitions_does_not_wait_either(tmp_path: Path) -> None:
    """NVMe offload of weights loads its op while the model is built, before any engine."""
    lock = tmp_path / "async_io" / "lock"
    lock.parent.mkdir()
    lock.touch()
    done = subprocess.run(
        [sys.executable, "-c", INIT],
        env={**os.environ, "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "MachineError" in done.stderr
    assert f"rm {lock}" in done.stderr
