"""Gradients stay local on most batches, by hand: no_sync, the triggers of a window, and freed memory."""

import contextlib
import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(output: str) -> None:
    accelerator = Accelerator(cpu=True)
    set_seed(6)
    x = torch.randn(96 * accelerator.num_processes, 4)
    loader = DataLoader(
        TensorDataset(x, x.abs()), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(0)
    )
    model = nn.Sequential(nn.Linear(4, 12), nn.GELU(), nn.Linear(12, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    window, losses, rates, norms, local = 3, [], [], [], []
    for _ in range(2):
        for index, (inputs, targets) in enumerate(loader):
            ends = (index + 1) % window == 0
            with contextlib.nullcontext() if ends else accelerator.no_sync(model):
                loss = nn.functional.l1_loss(model(inputs), targets) / window
                accelerator.backward(loss)
            mine = sum(p.grad.abs().sum() for p in model.parameters())
            local.append(accelerator.gather(mine.detach()).mean().item())
            if ends:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.3).item())
                rates.append(optimizer.param_groups[0]["lr"])
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
    weights = [p.abs().sum() for p in accelerator.unwrap_model(model).parameters()]
    apart = accelerator.gather(torch.stack(weights).detach()).view(accelerator.num_processes, -1)
    assert torch.equal(apart[0], apart[-1])
    if accelerator.is_main_process:
        results = {"losses": losses, "rates": rates, "norms": norms, "local": local, "weights": apart[0].tolist()}
        Path(output).write_text(json.dumps(results))
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
