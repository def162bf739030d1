"""A stream without a length trains and evaluates, and its samples are counted."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

# Intended differences of the two libraries: the numbers of processes, and the row of docs/.
DIFFERENCES = {"evaluated": ((2,), "a stream in a DataLoader")}


class Numbers(IterableDataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self):
        for number in range(self.count):
            x = torch.tensor([number / self.count, 1.0, (number * 7 % 5) / 5])
            yield {"x": x, "y": x.sum(), "number": number}


def main(output: str) -> None:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    set_seed(12)
    train_loader = DataLoader(Numbers(64 * accelerator.num_processes), batch_size=8)
    eval_loader = DataLoader(Numbers(45), batch_size=8)
    model = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 1))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=40, power=2.0)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    losses, rates, trained = [], [], []
    for _ in range(2):
        for batch in train_loader:
            loss = nn.functional.huber_loss(model(batch["x"]).squeeze(1), batch["y"])
            accelerator.backward(loss)
            rates.append(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
            trained += accelerator.gather(batch["number"]).tolist()
    assert sorted(trained) == sorted(2 * list(range(64 * accelerator.num_processes)))
    model.eval()
    evaluated = []
    for batch in eval_loader:
        with torch.no_grad():
            model(batch["x"])
        evaluated += accelerator.gather_for_metrics(batch["number"]).tolist()
    if accelerator.is_main_process:
        results = {"losses": losses, "rates": rates, "trained": trained, "evaluated": sorted(evaluated)}
        Path(output).write_text(json.dumps(results))
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
