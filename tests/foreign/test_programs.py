"""Unchanged libraries train under `zero-plugin launch` like one process without ZeRO.

Each file in `programs` imports a library, trains a tiny model with eight samples a step on any number of processes, and
prints the losses that the library logs. Programs without an installed library are skipped. `make test-foreign` installs
all libraries in a separate environment.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.programs

HERE = Path(__file__).parent
LAUNCH = (sys.executable, "-m", "zero_plugin", "launch")
# Each program's requirements and loss tolerance against one process. Some libraries round losses in their log.
PROGRAMS = {
    "diffusers_unconditional": (("diffusers",), 1e-4),
    "nanogpt": ((), 1e-4),
    "peft_lora": (("peft", "accelerate"), 2e-3),
    "sentence_transformers_trainer": (("sentence_transformers", "datasets"), 2e-3),
    "timm_ema": (("timm", "torchvision"), 1e-4),
    "trainer": (("accelerate",), 2e-3),
    "trl_dpo": (("trl", "datasets"), 2e-3),
    "trl_sft": (("trl", "datasets"), 2e-3),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "zero2": {"zero_optimization": {"stage": 2}},
    "zero3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    "zero3-cpu": {
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
        }
    },
}
DAILY = {("trainer", "zero2"), ("peft_lora", "zero3"), ("nanogpt", "zero2")}


@pytest.fixture(scope="module")
def plain_losses() -> dict[str, list[float]]:
    """Return the losses of each program on one process without ZeRO, cached."""
    return {}


@pytest.fixture
def losses_of(
    tmp_path: Path,
    run_launcher: Callable[..., Any],
    forked_workers: dict[str, str],
    forked_alone: dict[str, str],
    built_ops: None,
) -> Callable[..., list[float]]:
    """Run a program to its end, under the launcher if flags are given. Return the printed losses.

    The launcher is a fork, and so are the workers of programs that end their process group themselves.
    """

    def losses_of(program: str, *flags: str) -> list[float]:
        command = (*(LAUNCH if flags else LAUNCH[:1]), *flags, str(HERE / "programs" / f"{program}.py"))
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environ |= forked_workers if flags and not PROGRAMS[program][0] else forked_alone
        environ |= {} if flags else {"ACCELERATE_USE_CPU": "true"}
        done: subprocess.CompletedProcess[str] = run_launcher(command, seconds=400, cwd=tmp_path, env=environ)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
        line = next(line for line in done.stdout.splitlines() if line.startswith('{"losses"'))
        found: list[float] = json.loads(line)["losses"]
        return found

    return losses_of


def marks(program: str, config: str) -> list[pytest.MarkDecorator]:
    """Put each program into a group, so its losses on one process are computed once."""
    group = pytest.mark.xdist_group(f"foreign-{program}")
    return [group] if (program, config) in DAILY else [group, pytest.mark.campaign]


@pytest.mark.processes
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("program", "config"),
    [pytest.param(program, config, marks=marks(program, config)) for program in PROGRAMS for config in CONFIGS],
)
def test_trains_as_one_process_does(
    program: str,
    config: str,
    losses_of: Callable[..., list[float]],
    plain_losses: dict[str, list[float]],
    tmp_path: Path,
) -> None:
    """Two processes with ZeRO give the same losses."""
    needs, tolerance = PROGRAMS[program]
    if missing := [module for module in needs if importlib.util.find_spec(module) is None]:
        pytest.skip(f"{', '.join(missing)} not installed; `make test-foreign` has it")
    if program not in plain_losses:
        plain_losses[program] = losses_of(program)
    file = tmp_path / f"{config}.json"
    file.write_text(json.dumps(CONFIGS[config]))
    losses = losses_of(program, "--config_file", str(file), "--num_processes", "2")
    assert len(losses) == len(plain_losses[program]) > 3
    assert losses == pytest.approx(plain_losses[program], abs=tolerance)
    assert losses[-1] < losses[0]
