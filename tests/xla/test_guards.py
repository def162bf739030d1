"""What would train wrongly on XLA devices, or crash there, is an error that says what to do."""

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
    """torchrun's two on PJRT's CPU client have a runtime each, and an all-reduce between them would do nothing."""
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
    """What `--num_processes 2` leaves of torchrun's variables in a replica, where the runtime has one device."""
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
    """torch_xla takes the CPU where it finds no TPU; only a user's own word for that is followed."""
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
    """It does not train on the CPU unasked, nor where it tries again, as a notebook's cell."""
    done = run(tmp_path, "-c", TRIES_TWICE)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("torch_xla finds none here") == 2, done.stdout


def test_a_script_that_imports_torch_xla_itself(tmp_path: Path) -> None:
    """The import chooses the CPU where there is no TPU, as if it were the user's word: the run says what it is on."""
    script = "import torch_xla\nfrom zero_plugin import Accelerator\nAccelerator(config={'distributed_type': 'TPU'})"
    done = run(tmp_path, "-c", script)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "XLA on 1 × xla, PJRT_DEVICE is CPU" in done.stderr


def test_a_tpu_that_does_not_start(tmp_path: Path) -> None:
    """`PJRT_DEVICE=TPU` without one: what torch_xla says of it, and what to look at, in place of its traceback."""
    script = tmp_path / "train.py"
    script.write_text("def main():\n    pass\n")
    typed = ("-m", "zero_plugin", "launch", "--tpu", "--num_processes", "1", str(script))
    done = run(tmp_path, *typed, PJRT_DEVICE="TPU")
    assert done.returncode == 1
    assert "MachineError: the XLA runtime does not start with PJRT_DEVICE=TPU" in done.stderr
    assert "pip install 'zero-plugin[tpu]'" in done.stderr
