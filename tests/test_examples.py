"""The examples run by the commands at their top, on two processes, and learn."""

from __future__ import annotations

import ast
import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.programs

EXAMPLES = Path(__file__).parents[1] / "examples"
# Each example's measure of learning: the largest allowed ratio of its last value to its first.
FALLS = {
    "plain_loop": ("loss", 0.1),
    "transformers_finetune": ("loss", 0.6),
    "lora": ("loss", 0.7),
    "gan": ("distance", 0.6),
    "streaming_data": ("loss", 0.5),
    "diffusion": ("loss", 0.5),
    "resume": ("loss", 0.3),
    "long_context": ("loss", 0.7),
    "big_model_inference": ("difference", None),
}
DAILY = ("plain_loop", "resume", "streaming_data")


def commands_of(name: str) -> list[list[str]]:
    """Return the commands of the docstring's second paragraph, as they are typed."""
    docstring = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text(encoding="utf-8")))
    assert docstring is not None
    return [shlex.split(line) for line in docstring.split("\n\n")[1].splitlines()]


def test_all_are_here_and_name_themselves() -> None:
    """Each script is tested, and each command at its top launches it."""
    assert sorted(FALLS) == sorted(file.stem for file in EXAMPLES.glob("*.py"))
    for name in FALLS:
        for command in commands_of(name):
            assert command[:2] == ["zero-plugin", "launch"], name
            assert f"examples/{name}.py" in command


@pytest.mark.processes
@pytest.mark.parametrize(
    "name", [name if name in DAILY else pytest.param(name, marks=pytest.mark.campaign) for name in FALLS]
)
def test_it_learns(name: str, run_launcher: Callable[..., Any], forked_workers: dict[str, str], tmp_path: Path) -> None:
    """Its commands, one after another, end without an error, and the printed values fall."""
    for package in re.findall(r"^from (sklearn|transformers|peft)\b", (EXAMPLES / f"{name}.py").read_text(), re.M):
        pytest.importorskip(package, reason="pip install 'zero-plugin[examples]'")
    (tmp_path / "examples").symlink_to(EXAMPLES)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **forked_workers}
    printed = ""
    for _, *arguments in commands_of(name):
        command = [sys.executable, "-m", "zero_plugin", *arguments]
        done = run_launcher(command, seconds=250, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        assert "on 2 × cpu" in done.stderr
        printed += done.stdout
    measure, part = FALLS[name]
    values = [float(value) for value in re.findall(rf"\b{measure}(?: from the plain model:)? ([\d.e+-]+)", printed)]
    if part is None:
        assert values[-1] < 1e-3, printed
        assert re.search(r"[1-9]\d* of \d+ parts stay on disk", printed)
    else:
        assert len(values) > 3, printed
        assert values[-1] < part * values[0], printed
    if name == "resume":
        assert "resumes in epoch 1 after batch 13" in printed
