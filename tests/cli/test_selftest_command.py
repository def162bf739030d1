"""`zero-plugin test` on real processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launching import ends_of

from zero_plugin.cli.selftest import STEPS

pytestmark = [pytest.mark.programs, pytest.mark.processes, pytest.mark.timeout(1200)]

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


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        pytest.param("cpu", (), marks=pytest.mark.campaign),
        pytest.param("zero2", (), marks=pytest.mark.campaign),
        ("zero2", ("--sequence_parallel_size", "2")),
    ],
)
def test_two_processes(
    config: str, flags: tuple[str, ...], tmp_path: Path, run_launcher: Run, forked_workers: dict[str, str]
) -> None:
    """Two processes pass all checks, with numbers. Checks without use are left out, and no file stays on the disk."""
    (tmp_path / "shared").mkdir()
    arguments = ("--config_file", str(CONFIGS / f"{config}.yaml"), "--folder", "shared", *flags)
    variables = environment(tmp_path, **forked_workers)
    done = run_launcher(command(*arguments), seconds=120, cwd=tmp_path, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    found = checks(done)
    assert list(found) == list(STEPS)
    left_out = {"host and device", "NVMe"} | (set() if flags else {"shared samples"})
    assert {name for name, row in found.items() if row["result"] == "left out"} == left_out
    assert all(row["result"] == "ok" for name, row in found.items() if name not in left_out)
    assert "GB/s" in found["all_reduce"]["said"]
    assert ("ZeRO-2, bf16" if config == "zero2" else "DDP, fp32") in found["processes"]["said"]
    assert not list(tmp_path.glob("zero_plugin*"))
    assert not list((tmp_path / "shared").iterdir())


DIES = """
import os, sys
if os.environ.get("RANK") == "0" and "worker.py" in sys.argv[0] + " ".join(sys.orig_argv):
    from zero_plugin import Accelerator
    Accelerator.gather_for_metrics = lambda *_: os._exit(7)
"""


def test_a_process_that_dies_is_a_line_of_the_table(tmp_path: Path, run_launcher: Run) -> None:
    """Results before the exit are shown, then the check in which the process ended, with exit code and fix."""
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


def test_what_this_machine_lacks_is_told_with_its_remedy(
    tmp_path: Path, run_launcher: Run, forked_workers: dict[str, str]
) -> None:
    """An error that says what to do does not get the advice for a wrong result in addition."""
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    for file in (lock, lock.parent):
        os.utime(file, (0, 0))
    arguments = ("--config_file", str(CONFIGS / "zero2_offload.yaml"), "--num_processes", "1")
    added = environment(tmp_path, TORCH_EXTENSIONS_DIR=str(tmp_path), **forked_workers)
    found = checks(run_launcher(command(*arguments), seconds=120, cwd=tmp_path, env=added))["optimizer step"]
    assert found["result"] == "wrong"
    assert found["said"].startswith("A C++ op build was killed")
    assert f"rm {lock}" in found["fix"]
    assert "report it" not in found["fix"]


@pytest.mark.campaign
def test_two_machines(tmp_path: Path, start_program: Callable[..., subprocess.Popen[str]]) -> None:
    """Started on two machines, the command prints the same table on each. The checkpoint uses a shared folder."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    meeting = ("--num_machines", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", str(port))
    started = []
    for machine in ("0", "1"):
        arguments = (*meeting, "--cpu", "--num_processes", "2", "--machine_rank", machine, "--folder", "shared")
        added = environment(tmp_path)
        started.append(start_program(command(*arguments), gently=True, cwd=tmp_path, env=added))
    done = ends_of(*started, seconds=150)
    assert [code for code, _, _ in done] == [0, 0], done
    tables = [
        {row["check"]: (row["result"], row["said"]) for row in json.loads(output)["checks"]} for _, output, _ in done
    ]
    assert tables[0] == tables[1]
    assert tables[0]["checkpoint"][0] == "ok"


@pytest.mark.campaign
@pytest.mark.usefixtures("built_ops")
@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("config", ["cpu", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "zero3_nvme"])
def test_every_config(config: str, processes: int, tmp_path: Path, run_launcher: Run) -> None:
    """Each shipped config passes on one to three processes, in fp32 and in its own precision."""
    for flags in ((), ("--mixed_precision", "no")):
        if flags and config != "cpu":
            continue  # their precision is written in two places
        arguments = ("--config_file", str(CONFIGS / f"{config}.yaml"), "--num_processes", str(processes), *flags)
        done = run_launcher(command(*arguments), seconds=200, cwd=tmp_path, env=environment(tmp_path))
        assert done.returncode == 0, done.stdout + done.stderr
        assert checks(done)["optimizer step"]["result"] == "ok"
        assert (checks(done)["NVMe"]["result"] == "ok") == (config == "zero3_nvme")
