"""One rank of two runs out of memory: the other does not wait, one report appears, and the run may continue."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.programs, pytest.mark.processes, pytest.mark.timeout(1200)]

Launch = Callable[..., "subprocess.CompletedProcess[str]"]

SCRIPT = str(Path(__file__).parent / "train_short_of_memory.py")
DDP = {"distributed_type": "MULTI_CPU", "deepspeed_config": {"train_micro_batch_size_per_gpu": "auto"}}
ZERO = {
    "distributed_type": "DEEPSPEED",
    "deepspeed_config": {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    },
}


def write(folder: Path, config: dict[str, object]) -> str:
    file = folder / "launch.yaml"
    file.write_text(json.dumps({"use_cpu": True, "num_processes": 2, "mixed_precision": "no", **config}))
    return str(file)


def test_the_group_starts_again_with_smaller_micro_batches(launch: Launch, tmp_path: Path) -> None:
    """With a system limit (`ulimit -v`) from the start, accumulation, losses and weights equal a run with that size."""
    script = [SCRIPT, "ulimit", "4", "8", "0", str(tmp_path / "out")]
    done = launch("--config_file", write(tmp_path, ZERO), *script)
    assert done.returncode == 0, done.stderr
    backed_off, started_so = json.loads(done.stdout.splitlines()[-1])
    assert backed_off[0] == 2, done.stderr
    assert backed_off == started_so
    assert "all workers start again with micro-batch 4: each of the loader's batches is split into 2" in done.stderr
    assert done.stderr.count("CPU memory ran out on rank 1, in the forward, at micro-batch 8") == 1


def test_it_goes_on_from_what_this_launch_has_saved(launch: Launch, tmp_path: Path) -> None:
    """Later it resumes from the newest checkpoint, with the next sample, in equally many steps."""
    script = [SCRIPT, "torch", "4", "8", "1", str(tmp_path / "out")]
    config = write(tmp_path, DDP)
    done = launch("--config_file", config, *script)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("started")] == ["started at 0"] * 2 + [
        "started at 1"
    ] * 2 + ["started at 0"] * 2
    resumed, whole = json.loads(done.stdout.splitlines()[-1])
    assert resumed[1] == pytest.approx(whole[1][1:], abs=1e-5)
    assert resumed[2] == pytest.approx(whole[2], abs=1e-4)


def test_where_the_micro_batch_is_typed(launch: Launch, tmp_path: Path) -> None:
    """One report gives required and available memory and the fix. The exit code is the rank's. No rank waits."""
    config = write(tmp_path, {"distributed_type": "MULTI_CPU"})
    done = launch("--config_file", config, SCRIPT, "cuda", "4", "8", "0", str(tmp_path / "out"))
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("memory ran out on rank 1") == 1, done.stderr
    assert "in the forward, at micro-batch 8: 2 GiB were requested" in done.stderr
    smaller = (
        "1. batch_size=4 with gradient_accumulation_steps 2, the same global batch, or train_micro_batch_size_per_gpu"
    )
    assert smaller in done.stderr
    assert "2. activation checkpointing" in done.stderr
    assert "4. ZeRO, which partitions gradients and optimizer states: zero_stage: 2" in done.stderr
    assert done.stderr.count("Traceback") == 1, done.stderr
