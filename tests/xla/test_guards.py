"""Setups that would train wrongly or crash on XLA devices raise errors that say what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch_xla", reason="`make test-tpu` has torch_xla, in an environment of its own")


def run(tmp_path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    dropped = ("PJRT_DEVICE", "CPU_NUM_DEVICES", "WORLD_SIZE")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    environ = {**kept, "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240)


def test_processes_that_do_not_see_each_other(tmp_path: Path) -> None:
    """torchrun's two processes on PJRT's CPU client have separate runtimes, whose all-reduce would do nothing."""
    script = tmp_path / "train.py"
    script.write_text(
        "from zero_plugin import Accelerator\nAccelerator(config={'distributed_type': 'TPU'})\nprint('on')"
    )
    typed = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script))
    done = run(tmp_path, *typed, PJRT_DEVICE="CPU")
    assert done.returncode != 0
    assert "on" not in done.stdout.split()
    assert "LaunchError: 2 processes were started, but the XLA runtime connects 1 device (PJRT" in done.stderr
    assert "zero-plugin launch --tpu" in done.stderr


def test_fewer_devices_than_the_launcher_was_asked_for(tmp_path: Path) -> None:
    """torchrun's variables from `--num_processes 2` are refused in a replica whose runtime has one device."""
    made = "from zero_plugin import Accelerator; Accelerator(config={'distributed_type': 'TPU'}); print('on')"
    done = run(tmp_path, "-c", made, PJRT_DEVICE="CPU", WORLD_SIZE="2")
    assert done.returncode != 0
    assert "on" not in done.stdout.split()
    assert "LaunchError: 2 processes were started, but the XLA runtime connects 1 device (PJRT" in done.stderr


RUNTIMES = """
import os
from zero_plugin.errors import LaunchError, MachineError
from zero_plugin.machine.xla_runtime import start_runtime

def told():
    try:
        return start_runtime()
    except (LaunchError, MachineError) as error:
        return f"{type(error).__name__}: {error}"

print(told())
os.environ["PJRT_DEVICE"] = "NEURON"
print(told())
os.environ["PJRT_DEVICE"] = "CPU"
print(told())
"""


def test_another_device_than_a_tpu(tmp_path: Path) -> None:
    """torch_xla falls back to the CPU without a TPU. Only a user's explicit choice of the CPU is accepted."""
    done = run(tmp_path, "-c", RUNTIMES)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "LaunchError: the run is to train on a TPU, but torch_xla finds none here." in done.stdout
    assert "LaunchError: the run is to train on a TPU, but PJRT_DEVICE is NEURON." in done.stdout
    assert done.stdout.splitlines()[-1] == "CPU"


TRIES_TWICE = """
from zero_plugin import Accelerator
from zero_plugin.errors import LaunchError

for _ in range(2):
    try:
        Accelerator(config={"distributed_type": "TPU"})
    except LaunchError as error:
        print(error)
"""


def test_a_script_without_a_tpu(tmp_path: Path) -> None:
    """Without a TPU the script does not silently train on the CPU, not even on a second try, as in a notebook."""
    done = run(tmp_path, "-c", TRIES_TWICE)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("torch_xla finds none here") == 2, done.stdout


def test_a_script_that_imports_torch_xla_itself(tmp_path: Path) -> None:
    """An import of torch_xla without a TPU chooses the CPU like the user's choice would. The run logs its device."""
    script = "import torch_xla\nfrom zero_plugin import Accelerator\nAccelerator(config={'distributed_type': 'TPU'})"
    done = run(tmp_path, "-c", script)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "XLA on 1 × xla, PJRT_DEVICE is CPU" in done.stderr


def test_a_tpu_that_does_not_start(tmp_path: Path) -> None:
    """With `PJRT_DEVICE=TPU` but no TPU, torch_xla's message and a hint appear instead of its traceback."""
    script = tmp_path / "train.py"
    script.write_text("def main():\n    pass\n")
    typed = ("-m", "zero_plugin", "launch", "--tpu", "--num_processes", "1", str(script))
    done = run(tmp_path, *typed, PJRT_DEVICE="TPU")
    assert done.returncode == 1
    assert "MachineError: the XLA runtime does not start with PJRT_DEVICE=TPU" in done.stderr
    assert "pip install 'zero-plugin[tpu]'" in done.stderr
