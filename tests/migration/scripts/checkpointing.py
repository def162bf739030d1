"""Checkpoints are written at each epoch's end and every few steps. Training resumes from both without a difference."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# Intended differences of the two libraries: the numbers of processes, and the row of docs/.
DIFFERENCES = {
    "same_dropout_after_resume": ((1, 2), "random numbers within an epoch after `load_state`"),
    "same_shuffle_after_resume": ((1, 2), "the order of a shuffled epoch after `load_state`"),
}

EPOCHS = 3


class Counter:
    """A count of samples seen, which a checkpoint keeps."""

    def __init__(self) -> None:
        self.samples = 0

    def state_dict(self) -> dict:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict) -> None:
        self.samples = state["samples"]


class Run:
    def __init__(self, accelerator: Accelerator, *, shuffle: bool = False, dropout: float = 0.0) -> None:
        self.accelerator = accelerator
        set_seed(9)
        x = torch.randn(40 * accelerator.num_processes, 4)
        options = {"shuffle": True, "generator": torch.Generator().manual_seed(0)} if shuffle else {}
        loader = DataLoader(TensorDataset(x, x.cos()), batch_size=8, **options)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.Linear(8, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.7)
        self.model, self.optimizer, self.loader, self.scheduler = accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        self.counter = Counter()
        accelerator.register_for_checkpointing(self.counter)
        self.losses: list[float] = []
        self.rates: list[float] = []

    def train(self, loader, *, save_at: int | None = None, folder: Path | None = None) -> None:
        self.model.train()
        for step, (inputs, targets) in enumerate(loader):
            loss = nn.functional.mse_loss(self.model(inputs), targets)
            self.accelerator.backward(loss)
            self.rates.append(self.scheduler.get_last_lr()[0])
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.counter.samples += len(inputs)
            self.losses.append(self.accelerator.gather(loss.detach()).mean().item())
            if step == save_at:
                self.accelerator.save_state(str(folder))


def same(first: list[float], second: list[float]) -> bool:
    return len(first) == len(second) and torch.allclose(torch.tensor(first), torch.tensor(second), rtol=1e-6)


def main(output: str) -> None:
    folder = Path(output).parent
    project = ProjectConfiguration(
        project_dir=str(folder / "by_epoch"), automatic_checkpoint_naming=True, total_limit=2
    )
    accelerator = Accelerator(cpu=True, project_config=project)
    run = Run(accelerator)
    for _ in range(EPOCHS):
        run.train(run.loader)
        accelerator.save_state()
    accelerator.wait_for_everyone()
    kept = sorted(path.name for path in (folder / "by_epoch/checkpoints").iterdir())
    whole_losses, whole_rates, whole_samples = run.losses, run.rates, run.counter.samples

    run.losses, run.rates = [], []
    accelerator.load_state(str(folder / "by_epoch/checkpoints/checkpoint_1"))
    samples_at_load = run.counter.samples
    run.train(run.loader)
    assert same(run.losses, whole_losses[10:])
    assert run.rates == whole_rates[10:]

    # Every few steps: the interrupted epoch resumes at its next batch.
    accelerator.project_configuration.automatic_checkpoint_naming = False
    interrupted = {}
    for name, options in (("plain", {}), ("dropout", {"dropout": 0.2}), ("shuffled", {"shuffle": True})):
        accelerator.free_memory()
        run = Run(accelerator, **options)
        run.train(run.loader)
        run.train(run.loader, save_at=2, folder=folder / name)
        losses, run.losses = run.losses, []
        accelerator.load_state(str(folder / name))
        run.train(accelerator.skip_first_batches(run.loader, 3))
        interrupted[name] = {"losses": losses, "same_after_resume": same(run.losses, losses[8:])}
    if accelerator.is_main_process:
        results = {
            "losses": whole_losses,
            "rates": whole_rates,
            "samples": [whole_samples, samples_at_load],
            "kept": kept,
            "losses_of_interrupted": {name: found["losses"] for name, found in interrupted.items()},
            "same_after_resume": interrupted["plain"]["same_after_resume"],
            "same_dropout_after_resume": interrupted["dropout"]["same_after_resume"],
            "same_shuffle_after_resume": interrupted["shuffled"]["same_after_resume"],
        }
        Path(output).write_text(json.dumps(results))
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
