"""If GPU memory runs out, the run restarts with smaller micro-batches and gives the same losses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1200)]

SCRIPT = str(Path(__file__).parent / "train_short_of_memory.py")


@pytest.mark.parametrize("stage", [None, 2, 3])
def test_smaller_micro_batches_until_they_fit(stage: int | None, tmp_path: Path) -> None:
    """The micro-batch is halved twice, each logged once. Accumulation, losses and weights equal a run started so."""
    section: dict[str, object] = dict.fromkeys(
        ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"), "auto"
    )
    if stage is not None:
        section |= {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    kind = "NO" if stage is None else "DEEPSPEED"
    file = tmp_path / "launch.json"
    file.write_text(json.dumps({"distributed_type": kind, "mixed_precision": "no", "deepspeed_config": section}))
    launch = [sys.executable, "-m", "zero_plugin", "launch", "--num_processes", "1", "--config_file", str(file), SCRIPT]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    backed_off, started_so = json.loads(done.stdout.splitlines()[-1])
    assert backed_off[0] == 4, done.stderr
    assert started_so[0] == 4
    assert backed_off[1] == pytest.approx(started_so[1], rel=1e-4)
    assert backed_off[2] == pytest.approx(started_so[2], abs=1e-2)
    assert done.stderr.count("start again with micro-batch") + done.stderr.count("starts again with micro-batch") == 2
