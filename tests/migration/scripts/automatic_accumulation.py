"""The largest batch that fits is searched, and accumulation keeps the number of samples in a step."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, find_executable_batch_size, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WANTED = 32


def main(output: str) -> None:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    tried, losses, rates = [], [], []

    @find_executable_batch_size(starting_batch_size=10)
    def train(batch_size: int) -> None:
        nonlocal losses, rates
        accelerator.free_memory()
        tried.append(batch_size)
        losses, rates = [], []
        accelerator.gradient_accumulation_steps = WANTED // batch_size
        set_seed(3)
        x = torch.randn(128 * accelerator.num_processes, 5)
        loader = DataLoader(TensorDataset(x, x.sin()), batch_size=batch_size, shuffle=True)
        model = nn.Linear(5, 5)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                predictions = model(inputs)
                if batch_size > 8:  # a device with memory for eight
                    raise RuntimeError("CUDA out of memory.")
                loss = nn.functional.mse_loss(predictions, targets)
                accelerator.backward(loss)
                rates.append(scheduler.get_last_lr()[0])
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())

    train()
    if accelerator.is_main_process:
        results = {"tried": tried, "losses": losses, "rates": rates, "window": accelerator.gradient_accumulation_steps}
        Path(output).write_text(json.dumps(results))
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
