"""Train while the last rank's memory does not suffice for batches above LIMIT: KIND LIMIT BATCH FROM FOLDER.

KIND is the kind of shortage, from step FROM on. With `ulimit`, each step requests memory in proportion to its batch,
and the system grants enough for LIMIT samples. A checkpoint is saved after the first step. Then the same is trained
once more in the same processes, with the sufficient micro-batch and its accumulation.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path

import psutil
import torch
from torch.utils.data import DataLoader, TensorDataset

from zero_plugin import Accelerator, ProjectConfiguration
from zero_plugin.config.run_files import CUT_VARIABLE

SAMPLE = 2**27  # bytes


def run_out(kind: str) -> None:
    """Request more memory than any machine has, or raise a GPU's error."""
    if kind == "torch":
        torch.empty(1 << 47)
    elif kind == "ulimit":
        raise AssertionError("the system has granted more than its limit")
    elif kind == "python":
        bytearray(1 << 60)
    else:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 4")


def limit_memory(samples: int) -> None:
    """Limit this process to its present memory plus one and a half times the need of this number of samples."""
    taken = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (taken + 3 * samples * SAMPLE // 2, resource.RLIM_INFINITY))


def train(out: Path, kind: str, limit: int, size: int, asked: int, begins: int) -> tuple[int, list[float], list[float]]:
    """Return accumulation, the mean loss of each optimizer step, and sums of the last weights."""
    project = ProjectConfiguration(out, automatic_checkpoint_naming=True)
    accelerator = Accelerator(gradient_accumulation_steps=asked, project_config=project)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    x = torch.randn(48, 8)
    loader = DataLoader(TensorDataset(x, x[:, :4].sin()), batch_size=size, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if kind == "ulimit" and accelerator.is_last_process:
        limit_memory(limit)
    resumed = accelerator.resume()
    steps = resumed.steps if resumed else 0
    os.write(1, f"started at {steps}\n".encode())
    losses, parts = [], []
    for _ in range(resumed.epochs[0] if resumed else 0, 2):
        for features, targets in loader:
            with accelerator.accumulate(model):
                if kind == "ulimit" and accelerator.is_last_process:
                    assert len(torch.empty(len(features) * SAMPLE, dtype=torch.uint8))
                if steps >= begins and len(features) > limit and accelerator.is_last_process:
                    run_out(kind)
                loss = torch.nn.functional.mse_loss(model(features), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                parts.append(accelerator.reduce(loss.detach(), "mean").item())
            if accelerator.sync_gradients:
                losses.append(sum(parts) / len(parts))
                parts, steps = [], steps + 1
                if steps == 1 and begins:
                    accelerator.save_state()
    whole = accelerator.get_state_dict(model) or {}
    used = accelerator.gradient_accumulation_steps
    accelerator.end_training()
    return used, losses, [p.double().sum().item() for p in whole.values()]


if __name__ == "__main__":
    kind, (limit, size, begins), folder = sys.argv[1], map(int, sys.argv[2:5]), Path(sys.argv[5])
    results = [train(folder, kind, limit, size, 1, begins)]
    cut = int(os.environ.pop(CUT_VARIABLE, "1"))
    results.append(train(folder / "again", "" if kind == "ulimit" else kind, size, size // cut, cut, 0))
    if os.environ["RANK"] == "0":
        print(json.dumps(results))
