"""Big-model inference is independent of the rest."""

from __future__ import annotations

import subprocess
import sys


def test_what_it_loads() -> None:
    """It loads no strategy, DeepSpeed, transformers, or torch compiler, which takes seconds."""
    code = """
import sys
import torch
import zero_plugin.big_modeling, zero_plugin.hooks
unwanted = ["deepspeed", "transformers", "accelerate", "torch._dynamo"]
unwanted += ["zero_plugin.strategies", "zero_plugin.accelerator"]
print([name for name in unwanted if name in sys.modules])
zero_plugin.big_modeling.cpu_offload(torch.nn.Linear(2, 2))(torch.ones(2))
print("torch._dynamo" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.split("\n")[:2] == ["[]", "False"]
