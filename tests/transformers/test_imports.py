"""A run that does not use transformers does not import it."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
import sys, os
os.environ["DS_ACCELERATOR"] = "cpu"
import torch
from zero_plugin import Accelerator
accelerator = Accelerator(config={"use_cpu": True, "deepspeed_config": {"zero_optimization": {"stage": 3}}})
with accelerator.init_model():
    model = torch.nn.Linear(8, 4)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(2, 8)).sum())
optimizer.step()
accelerator.save_model(model, sys.argv[1])
print([name for name in ("transformers", "peft", "accelerate") if name in sys.modules])
"""


def test_a_plain_model_at_stage_3_needs_no_transformers(tmp_path: object) -> None:
    """A plain model at stage 3 builds, trains and saves without importing an installed transformers."""
    command = [sys.executable, "-W", "ignore", "-c", _SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().splitlines()[-1] == "[]"
