"""Losses and the learning rate go to a user's own tracker."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import ProjectConfiguration, set_seed, tqdm
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class ListTracker(GeneralTracker):
    """A tracker that keeps all values."""

    name = "list"
    requires_logging_directory = True

    @on_main_process
    def __init__(self, run_name: str, logging_dir: str) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = logging_dir
        self.lines: list[dict] = []
        self.config: dict = {}
        self.finished = False

    @property
    def tracker(self) -> list[dict]:
        return self.lines

    @on_main_process
    def store_init_configuration(self, values: dict) -> None:
        self.config = values

    @on_main_process
    def log(self, values: dict, step: int | None = None) -> None:
        self.lines.append({"step": step, **values})

    @on_main_process
    def finish(self) -> None:
        self.finished = True


def main(output: str) -> None:
    project = Path(output).parent
    PartialState(cpu=True)  # a tracker asks whether this is the main process
    tracker = ListTracker("digits", str(project))
    accelerator = Accelerator(
        cpu=True, log_with=tracker, project_config=ProjectConfiguration(project_dir=str(project), logging_dir="logs")
    )
    config = {"lr": 0.1, "epochs": 2, "optimizer": "SGD"}
    accelerator.init_trackers("digits", config=config)
    set_seed(1)
    x = torch.randn(64, 3)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.5)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=16)
    loader = DataLoader(
        TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(0)
    )
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    step = 0
    for epoch in range(config["epochs"]):
        total = 0.0
        for inputs, targets in tqdm(loader, disable=True):
            loss = nn.functional.mse_loss(model(inputs), targets)
            total += accelerator.gather(loss.detach()).mean().item()
            accelerator.backward(loss)
            accelerator.log({"lr": scheduler.get_last_lr()[0]}, step=step)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
        accelerator.log({"train_loss": total / len(loader), "epoch": epoch}, step=step)
    mine = accelerator.get_tracker("list")
    raw = accelerator.get_tracker("list", unwrap=True)
    accelerator.end_training()
    if accelerator.is_main_process:
        assert raw is mine.lines
        results = {
            "lines": mine.lines,
            "config": mine.config,
            "finished": mine.finished,
            "losses": [line["train_loss"] for line in raw if "train_loss" in line],
            "rates": [line["lr"] for line in raw if "lr" in line],
        }
        Path(output).write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
