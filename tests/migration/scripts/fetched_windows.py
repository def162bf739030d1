"""A window's batches are fetched first, so each loss is divided by the tokens of all of them."""

import contextlib
import json
import math
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# Intended differences of the two libraries: the numbers of processes, and the row of docs/.
DIFFERENCES = {
    "losses_after_a_short_window": ((1, 2), "the shorter last window of an epoch"),
    "weights_after_a_short_window": ((1, 2), "the shorter last window of an epoch"),
}
WINDOW, IGNORED = 4, -100


def train(accelerator: Accelerator, batches: int) -> tuple[list[float], list[float]]:
    """Return the loss of each step of two epochs, and the final weights."""
    set_seed(7)
    samples = batches * 2 * accelerator.num_processes
    tokens = torch.randint(0, 11, (samples, 6))
    labels = tokens.roll(-1, 1).masked_fill(torch.rand(samples, 6) < 0.4, IGNORED)
    loader = DataLoader(TensorDataset(tokens, labels), batch_size=2)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    for _ in range(2):
        iterator = iter(loader)
        for update in range(math.ceil(len(loader) / WINDOW)):
            window = [next(iterator) for _ in range(min(WINDOW, len(loader) - update * WINDOW))]
            count = accelerator.gather(sum(targets.ne(IGNORED).sum() for _, targets in window)).sum().item()
            total = 0.0
            for index, (inputs, targets) in enumerate(window):
                ends = index == len(window) - 1
                with contextlib.nullcontext() if ends else accelerator.no_sync(model):
                    loss = nn.functional.cross_entropy(model(inputs).transpose(1, 2), targets, reduction="sum")
                    # Undo the mean over processes and over the window's batches, because count covers all of them.
                    accelerator.backward(loss * WINDOW * accelerator.num_processes / count)
                    total += loss.detach() / count
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(total).sum().item())
    weights = [p.abs().sum().item() for p in accelerator.unwrap_model(model).parameters()]
    accelerator.free_memory()
    return losses, weights


def main(output: str) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW)
    losses, weights = train(accelerator, 8)
    shorter_losses, shorter_weights = train(accelerator, 10)
    if accelerator.is_main_process:
        results = {
            "losses": losses,
            "weights": weights,
            "losses_before_a_short_window": shorter_losses[:3],
            "losses_after_a_short_window": shorter_losses[3:],
            "weights_after_a_short_window": shorter_weights,
        }
        Path(output).write_text(json.dumps(results))
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
