"""docs/architecture.md names the files of five walks through the package, in the order in which they are entered.

`python tests/test_architecture.py` rewrites the walks.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from itertools import groupby
from pathlib import Path

import pytest

pytestmark = pytest.mark.programs  # it starts programs as a user does

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "zero_plugin"
DOCUMENT = ROOT / "docs" / "architecture.md"
_IN_WALK = re.compile(r"\d+\. `|   ")

# Record the package's files in the order of their functions' first calls, in the script's own thread.
_NOTE = """
import json, os, sys
package, entered = os.environ["PACKAGE"] + os.sep, {}
def note(frame, event, argument):
    code = frame.f_code
    is_function = code.co_flags & 1  # CO_OPTIMIZED: the body of a module or a class, which an import runs, has it not
    if event == "call" and is_function and code.co_filename.startswith(package):
        entered.setdefault(code.co_filename[len(package):].replace(os.sep, "/"))
def walk(name, function, *arguments, **named):
    entered.clear()
    sys.setprofile(note)
    try:
        return function(*arguments, **named)
    finally:
        sys.setprofile(None)
        print("WALK", json.dumps([name, list(entered)]), flush=True)
"""
_TRAINING = """
import torch
from zero_plugin import Accelerator
torch.manual_seed(0)
zero2 = {"distributed_type": "DEEPSPEED", "use_cpu": True, "deepspeed_config": {"zero_optimization": {"stage": 2}}}
setting = {"distributed_type": "NO", "use_cpu": True} if sys.argv[1] == "loop" else zero2
def make():
    accelerator = Accelerator(config=setting)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    adam = torch.optim.AdamW(net.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.randn(96, 8), torch.randn(96, 1))
    return accelerator, *accelerator.prepare(net, adam, torch.utils.data.DataLoader(data, batch_size=4))
if sys.argv[1] == "key":
    import deepspeed  # while nothing is noted: each call of its imports would take longer
    accelerator, model, optimizer, loader = walk("key", make)
else:
    accelerator, model, optimizer, loader = make()
    def step(x, y):
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for index, (x, y) in enumerate(loader):
        walk("step", step, x, y) if index == 20 else step(x, y)
    walk("save", accelerator.save_state, "saved")
accelerator.end_training()
"""
_COMMAND = """
from zero_plugin.cli.main import main
def run():
    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code
name = sys.argv.pop(1)
walk(name, run)
"""
# By the title of each walk: its name, the traced program, and the program's arguments.
WALKS = {
    "A config key to the engine": ("key", _TRAINING, ["key"]),
    "A batch through a step": ("step", _TRAINING, ["zero2"]),
    "A save": ("save", _TRAINING, ["loop"]),
    "A launch": ("launch", _COMMAND, ["launch", "launch", "--cpu", "--num_processes", "2", "script.py"]),
    "A plan": ("plan", _COMMAND, ["plan", "plan", "--params", "7B", "--gpu", "A100-80GB", "--gpus", "8"]),
}


@functools.cache
def _walks_of(program: str, *arguments: str) -> dict[str, list[str]]:
    """Return the files of each walk of a program."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        script = folder / "walk.py"
        script.write_text(_NOTE + program)
        (folder / "script.py").write_text("print('ran')\n")
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "CXX")}
        environment |= {"PACKAGE": str(PACKAGE), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        environment |= {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests" / "startup")))}
        environment["HF_HOME"] = made  # the folder of a default config
        done = subprocess.run(
            [sys.executable, str(script), *arguments], capture_output=True, text=True, cwd=folder, env=environment
        )
    walks = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("WALK ")]
    assert walks, done.stdout + done.stderr
    return dict(walks)


def _trace(title: str) -> list[str]:
    name, program, arguments = WALKS[title]
    return _walks_of(program, *arguments)[name]


def _lines(files: list[str]) -> list[str]:
    """Return the files as lines. Adjacent files of one room share a line."""
    rooms = groupby(files, key=lambda file: file.rpartition("/")[0])
    lines = []
    for number, (room, entered) in enumerate(rooms, 1):
        names = ", ".join(file.rpartition("/")[2].removesuffix(".py") for file in entered)
        lines += textwrap.wrap(
            f"{number}. `{room}/`: {names}" if room else f"{number}. `{names}.py`", 118, subsequent_indent="   "
        )
    return lines


def _documented(title: str) -> list[str]:
    section = DOCUMENT.read_text().partition(f"\n### {title}\n")[2].partition("\n#")[0]
    return [line for line in section.splitlines() if _IN_WALK.match(line)]


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("title", WALKS)
def test_walk(title: str) -> None:
    """The walk's files are the entered ones, in this order."""
    assert _documented(title) == _lines(_trace(title))


def main() -> None:
    """Rewrite the walks."""
    text = DOCUMENT.read_text()
    for title in WALKS:
        lines = _lines(_trace(title))
        before, heading, rest = text.partition(f"\n### {title}\n")
        body, following, after = rest.partition("\n#")
        prose = "\n".join(line for line in body.splitlines() if not _IN_WALK.match(line)).strip("\n")
        text = before + heading + "\n" + prose + "\n\n" + "\n".join(lines) + "\n" + following + after
    DOCUMENT.write_text(text)


if __name__ == "__main__":
    main()
