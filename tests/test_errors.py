"""An error of this package ends a program at the user's own line. Any other error has all of its frames."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.programs

WRONG = """
from zero_plugin import Accelerator

def build():
    return Accelerator(config={"zero_optimization": {"stage": 4}})

build()
"""
CALLED_BACK = """
from zero_plugin import Accelerator
from zero_plugin.utils import find_executable_batch_size

@find_executable_batch_size(starting_batch_size=2)
def train(batch_size):
    return Accelerator(config={"zero_optimization": {"stage": 4}})

train()
"""
DEFECT = """
from zero_plugin import Accelerator

class Broken(dict):
    def items(self):
        raise TypeError("a defect")

Accelerator(config=Broken(a=1))
"""


def run(program: str, folder: Path) -> tuple[list[str], str]:
    """Return the files of the frames that plain Python shows at the end of a program, and the last words."""
    (folder / "train.py").write_text(program)
    done = subprocess.run([sys.executable, "train.py"], cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    return [Path(file).name for file in re.findall(r'File "([^"]+)", line', done.stderr)], done.stderr


@pytest.mark.parametrize(
    ("program", "frames"),
    [(WRONG, ["train.py", "train.py"]), (CALLED_BACK, ["train.py", "memory.py", "train.py"])],
    ids=["called", "called back"],
)
def test_an_error_of_its_own(program: str, frames: list[str], tmp_path: Path) -> None:
    """The package's frames after the user's last line are hidden. Frames between two of the user's stay."""
    shown, text = run(program, tmp_path)
    assert shown == frames, text
    assert text.endswith(
        "zero_plugin.errors.ConfigError: 1 problem in the configuration:\n"
        "  Accelerator(config=…): zero_optimization.stage: 4 is not legal here\n"
        "      Write an integer from 0 to 3 or auto (default 0).\n"
    )


def test_a_defect(tmp_path: Path) -> None:
    """No frame of any other exception is left out."""
    shown, text = run(DEFECT, tmp_path)
    assert shown[:3] == ["train.py", "accelerator.py", "run.py"], text
    assert "read.py" in shown[3:], text
    assert text.endswith("TypeError: a defect\n")
