"""Each stratified fold of the digits trains its own model, and together the models predict the test set."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, release_memory, set_seed
from sklearn.datasets import load_digits
from sklearn.metrics import accuracy_score, f1_score
from sklearn.model_selection import StratifiedKFold
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


def main(output: str) -> None:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    digits = load_digits()
    data = torch.tensor(digits.data[:300], dtype=torch.float32) / 16
    labels = torch.tensor(digits.target[:300])
    train, test = TensorDataset(data[:230], labels[:230]), TensorDataset(data[230:], labels[230:])
    losses, rates, folds, predictions = [], [], [], []
    for seed, (fitted, held_out) in enumerate(StratifiedKFold(3).split(np.zeros(230), labels[:230])):
        set_seed(seed)
        train_loader = DataLoader(Subset(train, fitted.tolist()), batch_size=16, shuffle=True)
        eval_loader = DataLoader(Subset(train, held_out.tolist()), batch_size=16)
        test_loader = DataLoader(test, batch_size=16)
        model = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2 * len(train_loader))
        model, optimizer, train_loader, eval_loader, test_loader, scheduler = accelerator.prepare(
            model, optimizer, train_loader, eval_loader, test_loader, scheduler
        )
        for _ in range(2):
            model.train()
            for inputs, targets in train_loader:
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                rates.append(scheduler.get_last_lr()[0])
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                losses.append(accelerator.gather(loss.detach()).mean().item())
        model.eval()
        guesses, truth = [], []
        for inputs, targets in eval_loader:
            with torch.no_grad():
                found = accelerator.gather_for_metrics((model(inputs).argmax(dim=1), targets))
            guesses.append(found[0])
            truth.append(found[1])
        guessed, true = torch.cat(guesses).numpy(), torch.cat(truth).numpy()
        folds.append({"accuracy": accuracy_score(true, guessed), "f1": f1_score(true, guessed, average="macro")})
        assert len(true) == len(held_out)
        fold = []
        for inputs, _ in test_loader:
            with torch.no_grad():
                fold.append(accelerator.gather_for_metrics(model(inputs)))
        predictions.append(torch.cat(fold))
        model, optimizer, scheduler = release_memory(model, optimizer, scheduler)
        train_loader, eval_loader, test_loader = accelerator.free_memory(train_loader, eval_loader, test_loader)
    together = torch.stack(predictions).mean(dim=0).argmax(dim=1)
    if accelerator.is_main_process:
        accuracy = accuracy_score(test.tensors[1].numpy(), together.numpy())
        Path(output).write_text(json.dumps({"losses": losses, "rates": rates, "folds": folds, "together": accuracy}))
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
