"""Four small batches make a step. The epoch's end shortens the last window."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# Intended differences of the two libraries: the numbers of processes, and the row of docs/.
DIFFERENCES = {"losses_after_a_short_window": ((1, 2), "the shorter last window of an epoch")}


def main(output: str) -> None:
    plugin = GradientAccumulationPlugin(num_steps=4)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    set_seed(5)
    x = torch.randn(6 * 4 * accelerator.num_processes, 6)
    data = TensorDataset(x, (x[:, :1] * x[:, 1:2]).tanh())
    loader = DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(0))
    # six batches per process: a window of four, one of two
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.9)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    epochs, rates, synced = [], [], []
    for _ in range(2):
        epochs.append([])
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                synced.append(accelerator.sync_gradients)
                rates.append(optimizer.param_groups[0]["lr"])
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            epochs[-1].append(accelerator.gather(loss.detach()).mean().item())
    if accelerator.is_main_process:
        results = {"losses": epochs[0], "losses_after_a_short_window": epochs[1], "rates": rates, "synced": synced}
        Path(output).write_text(json.dumps(results))
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
