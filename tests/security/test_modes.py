"""Files that may hold a secret (records, resolved configurations, logs) are the user's alone, whatever the umask."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch
from zero_plugin import Accelerator
accelerator = Accelerator()
model, optimizer = accelerator.prepare(model := torch.nn.Linear(2, 2), torch.optim.SGD(model.parameters(), lr=0.1))
print("a secret")
accelerator.save_state("out/last")
accelerator.end_training()
"""
# Files meant for others: weights, and their descriptions.
SHARED = {"model.safetensors", "training.json", "random.json", "random.safetensors", "objects.json", "manifest.json"}
SHARED |= {"checksums.json", "checksums.safetensors", "train.py"}


@pytest.mark.processes
def test_with_an_umask_of_000(tmp_path: Path, forked_workers: dict[str, str]) -> None:
    """Everything that a launch leaves is 0600 in folders of 0700, except the checkpoint's own files."""
    (tmp_path / "train.py").write_text(SCRIPT)
    left = {name: str(tmp_path / "home" / name) for name in ("cache", "runs", "tmp")}
    (tmp_path / "home" / "tmp").mkdir(parents=True, mode=0o700)
    environment = {**os.environ, **forked_workers, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": left["cache"]}
    environment |= {"ZERO_PLUGIN_RUNS": left["runs"], "TMPDIR": left["tmp"]}
    command = [sys.executable, "-m", "zero_plugin", "launch", "--cpu", "--num_processes", "1", "--tee", "3"]
    command += ["--log_dir", str(tmp_path / "home" / "logs"), "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, umask=0, timeout=200)
    assert done.returncode == 0, done.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name not in SHARED]
    assert any("a secret" in path.read_text() for path in files), "the log is there"
    assert any(path.name == "resolved_config.json" for path in files)
    assert any(path.name.startswith("resolved-") for path in files)

    def is_open(path: Path) -> bool:
        """Return whether others can read the file: its mode and all parent folders allow it."""
        above = [folder for folder in path.parents if folder.is_relative_to(tmp_path)]
        return bool(path.stat().st_mode & 0o077) and all(folder.stat().st_mode & 0o077 for folder in above)

    tmp_path.chmod(0o755)
    assert [str(path) for path in files if is_open(path)] == []
