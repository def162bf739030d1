"""`zero-plugin env`: what a bug report needs."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from zero_plugin.machine.xla_runtime import PJRT_DEVICE


def test_versions_devices_and_default_config(tmp_path: Path) -> None:
    """Each on a line, and the text of the config that `launch` would take."""
    default = tmp_path / "zero_plugin" / "default_config.yaml"
    default.parent.mkdir()
    default.write_text("num_processes: 3\n")
    done = subprocess.run(
        [sys.executable, "-m", "zero_plugin", "env"],
        env={**os.environ, "HF_HOME": str(tmp_path), PJRT_DEVICE: ""},  # a test before may have imported torch_xla
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert lines["torch"] == version("torch")
    assert lines["deepspeed"] == version("deepspeed")
    assert lines["TPU"] == "none"
    assert lines["config"] == str(default)
    assert lines["num_processes:"] == "3"


def test_accelerates_words_for_config(tmp_path: Path) -> None:
    """`config default` writes without asking, `config update` rewrites the default file."""
    command = [sys.executable, "-m", "zero_plugin", "config"]
    options = {"env": {**os.environ, "HF_HOME": str(tmp_path)}, "capture_output": True, "text": True, "timeout": 60}
    assert subprocess.run([*command, "default"], **options).returncode == 0
    written = (tmp_path / "zero_plugin" / "default_config.yaml").read_text()
    assert "distributed_type: " in written
    assert "scheduler_counts" not in written
    done = subprocess.run([*command, "update"], **options)
    assert done.stdout.strip().endswith("nothing to change")
