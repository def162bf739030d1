"""`launch --tpu`, `test --tpu` and `notebook_launcher`, by real torch_xla on PJRT's CPU client."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch_xla", reason="`make test-tpu` has torch_xla, in an environment of its own")

HERE = Path(__file__).parent
CONFIG = HERE.parents[1] / "ds_configs" / "tpu.yaml"
SCRIPT = str(HERE / "launched.py")
Start = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Run this environment's Python on PJRT's CPU client to its end, in an empty folder with an empty home."""

    def start(*arguments: str, seconds: float = 240, **variables: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if name != "CPU_NUM_DEVICES"}
        own = {"HF_HOME": str(tmp_path), "TMPDIR": str(tmp_path), "ZERO_PLUGIN_RUNS": str(tmp_path / "runs")}
        environ = {**kept, **own, "PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1", **variables}
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=seconds)

    return start


def test_the_shipped_config_trains_as_plain_torch(start: Start, tmp_path: Path) -> None:
    """The script's `main` gets its arguments and trains like one process of plain torch."""
    typed = ("--config_file", str(CONFIG), "--num_processes", "1", "--mixed_precision", "no")
    done = start("-m", "zero_plugin", "launch", *typed, SCRIPT, str(tmp_path / "found"), "a b")
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "found").read_text())
    assert found["arguments"] == [str(tmp_path / "found"), "a b"]
    assert (found["module"], found["device"], found["type"], found["processes"]) == ("launched", "xla:0", "XLA", 1)
    assert max(found["apart"].values()) < 1e-4, found


def test_a_replica_that_fails_ends_the_others(start: Start) -> None:
    """All requested devices take part. One traceback names the rank that failed first, and no replica waits."""
    typed = ("--tpu", "--num_processes", "2", "--main_training_function", "fail_last")
    done = start("-m", "zero_plugin", "launch", *typed, SCRIPT, "x")
    assert sorted(done.stdout.splitlines()) == [f"replica {rank} of 2, 2 wanted: ['x']" for rank in (0, 1)]
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert "ValueError: the last one's" in done.stderr
    assert "replicas.py" not in done.stderr
    assert "rank 1 failed first, with exit code 1" in done.stderr


def test_sigterm_leaves_replicas_time_to_save(tmp_path: Path) -> None:
    """SIGTERM reaches the script's threads. Without a listener it would end them immediately."""
    typed = ("launch", "--tpu", "--num_processes", "2", "--main_training_function", "save_when_stopped", SCRIPT)
    environ = {**os.environ, "PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-m", "zero_plugin", *typed], env=environ, stdout=subprocess.PIPE, text=True
    ) as launcher:
        try:
            assert launcher.stdout is not None
            assert [launcher.stdout.readline() for _ in range(2)] == ["listens\n"] * 2
            launcher.send_signal(signal.SIGTERM)
            output, _ = launcher.communicate(timeout=60)
        finally:
            launcher.kill()  # the workers with it
    assert "saved" in output
    assert launcher.returncode == 143


def test_self_test(start: Start) -> None:
    """Data, an optimizer step against plain torch, a checkpoint and device copies pass on an XLA device."""
    done = start("-m", "zero_plugin", "test", "--tpu", "--json")
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    results = {row["check"]: row["result"] for row in json.loads(done.stdout)["checks"]}
    ok = {name for name, result in results.items() if result == "ok"}
    assert ok == {"processes", "data loader", "optimizer step", "checkpoint", "host and device"}


CELLS = """
import os
from zero_plugin.errors import LaunchError
from zero_plugin.launchers import notebook_launcher

table = {"value": lambda: 3}

def show(text, table):
    import torch_xla.runtime as runtime
    os.write(1, f"{text} {table['value']()} {runtime.global_ordinal()} of {runtime.world_size()}\\n".encode())

def prepare(text, table):
    from zero_plugin import Accelerator
    Accelerator()

def launch(function, text, processes):
    try:
        notebook_launcher(function, (text, table), num_processes=processes, config={"distributed_type": "TPU"})
    except LaunchError as error:
        print(error)

launch(show, "copy", 2)
launch(prepare, "", 2)
launch(show, "here", 1)
launch(show, "copy", 2)
"""


def test_notebook(start: Start) -> None:
    """A cell's function runs in a copy for each device, or here on one, and its errors are raised here.

    Replicas that are threads of one process are refused, and so are copies of a process that has used a device.
    """
    done = start("-c", CELLS)
    assert done.returncode == 0, done.stderr[-4000:]
    shown = sorted(line for line in done.stdout.splitlines() if line.startswith(("copy", "here")))
    assert shown == ["copy 3 0 of 2", "copy 3 1 of 2", "here 3 0 of 1"]
    assert "failed first; all are stopped." in done.stdout
    assert "2 replicas, and several are threads of one process" in done.stdout
    assert "this process has used an XLA device already" in done.stdout
