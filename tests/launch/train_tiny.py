"""A complete training script for the launch tests: placeholders, accumulation, clipping; prints the results as JSON."""

from __future__ import annotations

import json
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

from zero_plugin import Accelerator, DummyOptim, DummyScheduler, set_seed


def main() -> None:
    """Train six batches. A first argument names the configuration in code."""
    accelerator = Accelerator(config=sys.argv[1]) if len(sys.argv) > 1 else Accelerator()
    set_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, x[:, :4].sin()), batch_size=8 // accelerator.num_processes)
    optimizer = DummyOptim(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    scheduler = DummyScheduler(optimizer, total_num_steps=6, warmup_num_steps=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    for features, targets in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(features).float(), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    config = accelerator.resolved.deepspeed_config()
    accelerator.print(
        json.dumps(
            {
                "processes": accelerator.num_processes,
                "precision": accelerator.mixed_precision,
                "model": type(model).__name__,
                "optimizer": type(optimizer.optimizer).__name__,
                "losses": losses,
                "lr": scheduler.get_last_lr(),
                "config": config,
            }
        )
    )


if __name__ == "__main__":
    main()
