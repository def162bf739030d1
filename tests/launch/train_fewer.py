"""Train two epochs of eight steps on eight samples each, for any number of processes. Save after each step."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from zero_plugin import Accelerator, ProjectConfiguration

SAMPLES = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
EPOCHS = 2


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Build the same everywhere."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 0.95**count)


def main(out: Path, pause: float) -> None:
    """Write steps, learning rate and weights at the end. Wait after step 3 while OUT/hold exists.

    Args:
        out: folder of the run.
        pause: seconds of waiting after each step, until OUT/hurry exists.
    """
    project = ProjectConfiguration(out, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    model, optimizer, schedule = build()
    loader = DataLoader(TensorDataset(SAMPLES, SAMPLES[:, :4].sin()), batch_size=4)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    resumed = accelerator.resume()
    steps = resumed.steps if resumed else 0
    os.write(1, f"{accelerator.num_processes} at {steps}\n".encode())
    for _ in range(resumed.epochs[0] if resumed else 0, EPOCHS):
        for features, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.mse_loss(model(features), targets))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                steps += 1
                accelerator.save_state()
                os.write(1, f"step {steps}\n".encode())
                if not (out / "hurry").exists():
                    time.sleep(pause)
                while steps == 3 and (out / "hold").exists():
                    time.sleep(0.1)
    whole = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        weights = {name: tensor.tolist() for name, tensor in whole.items()}
        (out / "final.json").write_text(json.dumps([steps, schedule.get_last_lr()[0], weights]))
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
