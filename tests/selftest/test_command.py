"""`zero-plugin test` on real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zero_plugin.selftest.outcome import STEPS

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

CONFIGS = Path(__file__).parents[2] / "ds_configs"
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "zero_plugin", "test", "--json", *arguments]


def environment(folder: Path, **added: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    return {**kept, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", **added}


def checks(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    report = json.loads(done.stdout)
    assert report["passed"] == (done.returncode == 0)
    return {row["check"]: row for row in report["checks"]}


@pytest.mark.parametrize("config", ["cpu", "zero2"])
def test_two_processes(config: str, tmp_path: Path, run_launcher: Run) -> None:
    """All passes, with numbers; what the run has no use for is left out; nothing is left on the disk."""
    done = run_launcher(
        command("--config_file", str(CONFIGS / f"{config}.yaml")), seconds=120, cwd=tmp_path, env=environment(tmp_path)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = checks(done)
    assert list(found) == list(STEPS)
    assert {name for name, row in found.items() if row["result"] == "left out"} == {"host and device", "NVMe"}
    assert all(row["result"] == "ok" for name, row in found.items() if name not in ("host and device", "NVMe"))
    assert "GB/s" in found["all_reduce"]["said"]
    assert ("ZeRO-2, bf16" if config == "zero2" else "DDP, fp32") in found["processes"]["said"]
    assert not list(tmp_path.glob("zero_plugin*"))


DIES = """
import os, sys
if os.environ.get("RANK") == "0" and "worker.py" in sys.argv[0] + " ".join(sys.orig_argv):
    import zero_plugin.selftest.data as data
    def end(run): os._exit(7)
    data.check_data_loader = end
"""


def test_a_process_that_dies_is_a_line_of_the_table(tmp_path: Path, run_launcher: Run) -> None:
    """What was measured before is shown, then the check in which it ended, with its exit code and what to do."""
    (tmp_path / "sitecustomize.py").write_text(DIES)
    arguments = ("--cpu", "--num_processes", "1")
    added = environment(tmp_path, PYTHONPATH=str(tmp_path))
    done = run_launcher(command(*arguments), seconds=120, cwd=tmp_path, env=added)
    assert done.returncode == 1
    found = checks(done)
    assert (found["processes"]["result"], found["broadcast"]["result"]) == ("ok", "left out")
    assert found["data loader"]["result"] == "wrong"
    assert "exit code 7" in found["data loader"]["said"]
    assert found["data loader"]["fix"]
    assert list(found)[-1] == "data loader"


@pytest.mark.campaign
@pytest.mark.usefixtures("built_ops")
@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("config", ["cpu", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "zero3_nvme"])
def test_every_config(config: str, processes: int, tmp_path: Path, run_launcher: Run) -> None:
    """Each shipped config on one to three processes, in fp32 as well as in its own precision."""
    for flags in ((), ("--mixed_precision", "no")):
        if flags and config != "cpu":
            continue  # their precision is written in two places
        arguments = ("--config_file", str(CONFIGS / f"{config}.yaml"), "--num_processes", str(processes), *flags)
        done = run_launcher(command(*arguments), seconds=200, cwd=tmp_path, env=environment(tmp_path))
        assert done.returncode == 0, done.stdout + done.stderr
        assert checks(done)["optimizer step"]["result"] == "ok"
        assert (checks(done)["NVMe"]["result"] == "ok") == (config == "zero3_nvme")
