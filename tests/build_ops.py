"""Build DeepSpeed's C++ ops for the tests, by tests/quick-g++: minutes on a new machine, then nothing.

`make test` runs this file in parallel with the checks and the first tests. A test that needs the ops waits for it.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from device import DEVICE, ON_GPU

from zero_plugin.machine.op_builds import build_folder, find_stale_build_locks

_OPS = ("CPUAdam", "CPUAdagrad", "CPULion", "AsyncIO", "PinMemory")
_OPS_OF = {"cpu": (*_OPS, "FusedAdam", "ShareMemComm"), "cuda": (*_OPS, "FusedAdam", "FusedLion")}
_BUILD = """
import sys
from deepspeed.accelerator import get_accelerator
for op in sys.argv[1:]:
    get_accelerator().create_op_builder(op + "Builder").load(verbose=False)
"""


def use_quick_compiler() -> None:
    """Make this process, and all that it starts, build ops with one compiler and one ninja.

    A build by another compiler or another ninja is no longer valid, and would be repeated in the middle of a test. So
    the compiler is named without the folder of this checkout, and ninja is the one next to this Python.
    """
    os.environ["CXX"] = "quick-g++"
    folders = (Path(__file__).parent, Path(sys.executable).parent, os.environ["PATH"])
    os.environ["PATH"] = os.pathsep.join(map(str, folders))


def build_ops() -> None:
    """Build the missing ops. A second caller waits for the first."""
    with Path(tempfile.gettempdir(), f"zero_plugin_ops_{os.getuid()}.lock").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # pytest runs in several processes
        # DeepSpeed's own check of built ops takes half a minute of CPU time in every pytest process.
        folder = os.environ.get("TORCH_EXTENSIONS_DIR")
        stamp = folder and Path(
            folder, f"built-by-{version('deepspeed')}-for-{version('torch')}-{DEVICE}-{sys.version_info.minor}"
        )
        if not (stamp and stamp.exists()):
            _build()
        if stamp:
            stamp.touch()


def _build() -> None:
    import torch

    folder = build_folder(os.environ, torch.version.cuda)
    for lock in find_stale_build_locks([file.name for file in folder.glob("*")], folder):
        lock.unlink()  # from a test run that was killed
    # One import of DeepSpeed serves all ops, one op after the other: each op's compilers run in parallel. A machine
    # with a GPU has enough cores to build all ops together.
    ops = _OPS_OF[DEVICE]
    builds = [
        subprocess.Popen(
            [sys.executable, "-c", _BUILD, *part],
            env={**os.environ, "DS_ACCELERATOR": DEVICE},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for part in ([[op] for op in ops] if ON_GPU else [ops])
    ]
    for build in builds:
        told, _ = build.communicate(timeout=3600)
        assert build.returncode == 0, told[-4000:]


if __name__ == "__main__":
    if not ON_GPU:
        use_quick_compiler()
    build_ops()
