"""Trains where GPU memory fits eight samples, then again with the batch size that fitted: FOLDER."""

from __future__ import annotations

import json
import os

import torch
from torch.utils.data import DataLoader, TensorDataset

from zero_plugin import Accelerator
from zero_plugin.config.run_files import CUT_VARIABLE

LENGTH, WIDTH, LAYERS = 2048, 1024, 16
CAP = 9 << 28  # a sample's activations take 1/8 GiB, so 16 samples take 2 GiB of activations alone


def train(size: int, accumulation: int) -> tuple[int, list[float], list[float], float]:
    """Return accumulation, mean loss of each step, sums of the final weights, and peak memory in GiB."""
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(CAP / total, 0)
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*layers)
    x = torch.randn(64, LENGTH, WIDTH)
    loader = DataLoader(TensorDataset(x), batch_size=size, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, parts = [], []
    for (batch,) in loader:
        with accelerator.accumulate(model):
            loss = (model(batch) - batch.sin()).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            parts.append(loss.item())
        if accelerator.sync_gradients:
            losses.append(sum(parts) / len(parts))
            parts = []
    whole = accelerator.get_state_dict(model) or {}
    used = accelerator.gradient_accumulation_steps
    accelerator.end_training()
    return used, losses, [p.double().sum().item() for p in whole.values()], torch.cuda.max_memory_allocated() / 2**30


if __name__ == "__main__":
    results = [train(32, 1)]
    cut = int(os.environ.pop(CUT_VARIABLE, "1"))
    results.append(train(32 // cut, cut))
    print(json.dumps(results))
