"""One process decides to stop, and all stop together."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class EarlyStopping:
    def __init__(self, patience: int = 2, least: float = 0.05) -> None:
        self.patience, self.least = patience, least
        self.best, self.misses = float("inf"), 0

    def __call__(self, loss: float) -> bool:
        if loss < self.best - self.least:
            self.best, self.misses = loss, 0
        else:
            self.misses += 1
        return self.misses >= self.patience


def main(output: str) -> None:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(2)
    x = torch.randn(512, 3)
    loader = DataLoader(TensorDataset(x, x @ torch.tensor([[1.0], [-2.0], [0.5]])), batch_size=8, shuffle=True)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=40)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    stopping = EarlyStopping()
    losses, rates, stopped_at = [], [], None
    for step, (inputs, targets) in enumerate(loader):
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
        if accelerator.is_last_process and stopping(loss.item()):
            accelerator.set_trigger()
        if accelerator.check_trigger():
            stopped_at = step
            break
    assert stopped_at is not None
    assert not accelerator.check_trigger()
    together = accelerator.gather(torch.tensor([stopped_at]))
    assert (together == stopped_at).all()
    if accelerator.is_main_process:
        Path(output).write_text(json.dumps({"losses": losses, "rates": rates, "stopped_at": stopped_at}))
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
