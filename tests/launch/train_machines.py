"""Train a small model at ZeRO-2, then at ZeRO-3. With `on`, continue until stopped."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta

import torch
from torch.utils.data import DataLoader, TensorDataset

from zero_plugin import Accelerator, InitProcessGroupKwargs

SAMPLES = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))


def build_model() -> torch.nn.Module:
    """Build the same on every process."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))


def train(stage: int, *, go_on: bool) -> list[float]:
    """Take three steps of plain SGD on 8 samples each. Return the mean losses over all processes."""
    config = {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    patience = int(os.environ["PATIENCE"]) if go_on else 120  # by then they have met and are at the same point
    waits = InitProcessGroupKwargs(timeout=timedelta(seconds=patience))
    accelerator = Accelerator(config=config, kwargs_handlers=[waits])
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(SAMPLES, SAMPLES[:, :4].sin()), batch_size=8 // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    while len(losses) < 3 or go_on:
        for features, targets in loader:
            loss = torch.nn.functional.mse_loss(model(features), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
            if go_on and len(losses) == 3:
                os.write(1, b"going on\n")
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    os.write(1, (json.dumps({stage: train(stage, go_on=False) for stage in (2, 3)}) + "\n").encode())
    if "on" in sys.argv:
        train(3, go_on=True)
