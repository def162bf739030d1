"""A long warm-up with transformers' scheduler, a plateau scheduler in addition, and clipped values."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_cosine_schedule_with_warmup

# Intended differences of the two libraries: the numbers of processes, and the row of docs/.
DIFFERENCES = {"plateau_rates": ((2,), "ReduceLROnPlateau")}


def train_with_warm_up(accelerator: Accelerator, results: dict) -> None:
    set_seed(8)
    x = torch.randn(160 * accelerator.num_processes, 4)
    loader = DataLoader(
        TensorDataset(x, x.flip(1)), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(0)
    )
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    scheduler = get_cosine_schedule_with_warmup(
        optimizer, num_warmup_steps=16 * accelerator.num_processes, num_training_steps=20 * accelerator.num_processes
    )
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    results["losses"], results["rates"] = [], []
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_value_(model.parameters(), 0.1)
        results["rates"].append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
        results["losses"].append(accelerator.gather(loss.detach()).mean().item())
    results["end"] = scheduler.get_last_lr()[0]
    accelerator.free_memory()


def train_to_a_plateau(accelerator: Accelerator, results: dict) -> None:
    set_seed(8)
    loader = DataLoader(TensorDataset(torch.zeros(16 * accelerator.num_processes, 2)), batch_size=8)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    results["plateau_rates"] = []
    for _ in range(8):
        for (inputs,) in loader:
            accelerator.backward(model(inputs).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step(1.0)  # no better than before
        results["plateau_rates"].append(optimizer.param_groups[0]["lr"])


def main(output: str) -> None:
    accelerator = Accelerator(cpu=True)
    results: dict = {}
    train_with_warm_up(accelerator, results)
    train_to_a_plateau(accelerator, results)
    if accelerator.is_main_process:
        Path(output).write_text(json.dumps(results))
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
