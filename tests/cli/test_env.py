"""`zero-plugin env`: the facts of a bug report."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from launching import run_afresh

from zero_plugin.machine.xla_runtime import PJRT_DEVICE


def test_versions_devices_and_default_config(tmp_path: Path) -> None:
    """Each version and device is a line, followed by the text of the config that `launch` would use."""
    default = tmp_path / "zero_plugin" / "default_config.yaml"
    default.parent.mkdir()
    default.write_text("num_processes: 3\n")
    variables = {"HF_HOME": str(tmp_path), PJRT_DEVICE: ""}  # an earlier test may have imported torch_xla
    done = run_afresh("-m", "zero_plugin", "env", **variables)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert lines["torch"] == version("torch")
    assert lines["deepspeed"] == version("deepspeed")
    assert lines["TPU"] == "none"
    assert lines["config"] == str(default)
    assert lines["num_processes:"] == "3"


def test_accelerates_words_for_config(tmp_path: Path) -> None:
    """`config default` writes without questions. `config update` rewrites the default file."""
    command = ("-m", "zero_plugin", "config")
    assert run_afresh(*command, "default", HF_HOME=str(tmp_path)).returncode == 0
    written = (tmp_path / "zero_plugin" / "default_config.yaml").read_text()
    assert "distributed_type: " in written
    assert "scheduler_counts" not in written
    done = run_afresh(*command, "update", HF_HOME=str(tmp_path))
    assert done.stdout.strip().endswith("nothing to change")
