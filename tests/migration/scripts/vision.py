"""A small convolutional network learns scikit-learn's handwritten digits, with a one-cycle learning rate."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

# Intended differences of the two libraries: the numbers of processes, and the row of docs/.
DIFFERENCES = {"rates_at_the_end": ((2,), "OneCycleLR in several processes")}


def main(output: str) -> None:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(42)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    # 25 batches: 13 steps on two processes, of which the last is completed.
    train_loader = DataLoader(TensorDataset(images[:800], labels[:800]), batch_size=32, shuffle=True)
    eval_loader = DataLoader(TensorDataset(images[800:1201], labels[800:1201]), batch_size=64)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(64, 10),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    epochs = 1
    scheduler = OneCycleLR(optimizer, max_lr=2e-2, epochs=epochs, steps_per_epoch=len(train_loader))

    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    train_loader, eval_loader = accelerator.prepare(train_loader, eval_loader)

    losses, rates, accuracies = [], [], []
    for _ in range(epochs):
        model.train()
        for inputs, targets in train_loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            losses.append(accelerator.gather(loss.detach()).mean().item())
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        right = seen = 0
        for inputs, targets in eval_loader:
            with torch.no_grad():
                predictions = model(inputs).argmax(dim=-1)
            predictions, targets = accelerator.gather_for_metrics((predictions, targets))
            right += (predictions == targets).sum().item()
            seen += len(targets)
        accuracies.append(right / seen)
        assert seen == 401
    rates_at_the_end = [optimizer.param_groups[0]["lr"]]

    accelerator.wait_for_everyone()
    weights = accelerator.get_state_dict(model)
    file = Path(output).with_name("weights.pt")
    accelerator.save(weights, file)
    accelerator.wait_for_everyone()
    saved = torch.load(file)
    accelerator.unwrap_model(model).load_state_dict(saved)
    if accelerator.is_main_process:
        results = {
            "losses": losses,
            "rates": rates,
            "rates_at_the_end": rates_at_the_end,
            "accuracies": accuracies,
            "norms": {name: tensor.norm().item() for name, tensor in saved.items()},
        }
        Path(output).write_text(json.dumps(results))
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
