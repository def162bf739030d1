"""A value in code that contradicts the file: one message for all ranks, and the flag that settles it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.programs, pytest.mark.processes]

SCRIPT = """
from zero_plugin import Accelerator
accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16")
accelerator.print(accelerator.gradient_accumulation_steps, accelerator.mixed_precision)
"""
CONFIG = """\
distributed_type: MULTI_CPU
mixed_precision: "no"
num_processes: 2
deepspeed_config:
  gradient_accumulation_steps: 1
"""


def test_it_is_told_once_and_settled_by_a_word(
    launch: Callable[..., subprocess.CompletedProcess[str]],
    lines_of: Callable[..., Iterator[str]],
    tmp_path: Path,
) -> None:
    """One rank prints one message with both pairs and the flag. With the flag, the preferred values run."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "c.yaml").write_text(CONFIG)
    refused = launch("--config", "c.yaml", "train.py")
    assert refused.returncode == 2
    assert refused.stderr.count("gradient_accumulation_steps: 2 in code, but 1 at c.yaml:5:3") == 1, refused.stderr
    assert refused.stderr.count('mixed_precision: "bf16" in code, but "no" at c.yaml:2:1') == 1
    assert "give --prefer code or --prefer file" in refused.stderr
    assert "failed later" not in refused.stderr
    for prefer, said in (("code", "2 bf16"), ("file", "1 no")):
        ran = launch("--config", "c.yaml", "--prefer", prefer, "train.py")
        assert (ran.returncode, list(lines_of(ran.stdout.splitlines()))) == (0, [said]), ran.stderr
        assert ran.stderr.count(f"since prefer is {prefer}") == 2
