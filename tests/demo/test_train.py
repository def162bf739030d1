"""The demo's script, run for real, learns and leaves all promised files, however it is started."""

import csv
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from zero_plugin.demo import train
from zero_plugin.demo.train import GPT, Blocks, GPTConfig, next_byte_loss, read_text

pytestmark = pytest.mark.programs

SMALL = ["--steps=12", "--batch_size=32", "--block=32", "--width=32", "--layers=1", "--heads=2", "--sample=8"]
DEMO = ["-m", "zero_plugin", "demo"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(train.__file__)]
WAYS = {
    "python": [str(train.__file__)],
    "torchrun": TORCHRUN,
    "zero2": [*DEMO, "--"],
    "zero3": [*DEMO, "--zero_stage=3", "--"],
    "ddp": [*DEMO, "--config_file=cpu", "--"],
}


@pytest.mark.parametrize("count", ["-1", "0", "1.5", "many"])
def test_counts_are_at_least_one(
    count: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A number of steps below one is a usage error, not a traceback from inside the loop."""
    monkeypatch.setattr(sys, "argv", ["train.py", f"--steps={count}"])
    with pytest.raises(SystemExit, match="2"):
        train.read_arguments()
    assert f"--steps: {count} is not an integer of at least 1" in capsys.readouterr().err


@pytest.mark.processes
def test_fewer_steps_than_one_accumulation_are_refused(
    run_launcher: Callable[..., Any], forked_workers: dict[str, str], tmp_path: Path
) -> None:
    """Fewer steps than one accumulation window are refused, because they train nothing."""
    command = [sys.executable, *DEMO, "--cpu", "--num_processes=2", "--gradient_accumulation_steps=16", "--", *SMALL]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **forked_workers}
    done = run_launcher(command, seconds=200, cwd=tmp_path, env=environment)
    assert done.returncode == 2
    assert "--steps: 12 batches make no optimizer step of 16 batches" in done.stderr
    assert not (tmp_path / "demo_output").exists()


@pytest.mark.processes
@pytest.mark.parametrize(
    "way", [way if way in ("zero2", "python") else pytest.param(way, marks=pytest.mark.campaign) for way in WAYS]
)
def test_script_leaves_weights_curves_and_a_sample(
    way: str,
    run_launcher: Callable[..., Any],
    forked_workers: dict[str, str],
    forked_alone: dict[str, str],
    tmp_path: Path,
) -> None:
    """Weights load into the plain module and give the printed loss. The table has one row for each step."""
    forks = forked_alone if way == "python" else forked_workers
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **forks}
    command = [sys.executable, *WAYS[way], *SMALL]
    done = run_launcher(command, seconds=250, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    printed = float(re.findall(r"held-out loss: ([\d.]+) bits per byte", done.stdout)[0])
    assert printed < 7.5, "twelve steps take more than half a bit off the uniform guess of 8"

    output = tmp_path / "demo_output"
    model = GPT(GPTConfig(**json.loads((output / "model" / "config.json").read_text())))
    model.load_state_dict(load_file(output / "model" / "model.safetensors"))
    blocks = Blocks(read_text()[1], block=32)
    ids, targets = (torch.stack(side) for side in zip(*(blocks[i] for i in range(len(blocks))), strict=True))
    with torch.no_grad():
        bits = next_byte_loss(model(ids), targets).mean().item() / torch.log(torch.tensor(2.0)).item()
    assert bits == pytest.approx(printed, abs=1e-3)

    assert (output / "curves.png").read_bytes().startswith(b"\x89PNG")
    with (output / "curves.csv").open(newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == [str(step) for step in range(1, 13)]
    assert len((output / "sample.txt").read_bytes()) == len(b"    def __init__(self, ") + 8
