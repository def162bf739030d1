"""A tiny transformer classifies a line of bytes by its module of the standard library."""

import argparse
import calendar
import inspect
import json
import sys
import textwrap
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader


class Classifier(nn.Module):
    def __init__(self, labels: int, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(width, labels)

    def forward(self, input_ids, attention_mask, labels=None):
        hidden = self.encoder(self.embedding(input_ids), src_key_padding_mask=attention_mask == 0)
        mask = attention_mask.unsqueeze(-1)
        logits = self.head((hidden * mask).sum(1) / mask.sum(1))
        return {"logits": logits, "loss": None if labels is None else nn.functional.cross_entropy(logits, labels)}


def read_samples() -> list[dict]:
    samples = []
    for label, module in enumerate((argparse, calendar, textwrap)):
        lines = [line for line in inspect.getsource(module).splitlines() if len(line) > 20]
        samples += [{"bytes": line.encode()[:64], "label": label} for line in lines[:90]]
    return samples


def collate(samples: list[dict]) -> dict[str, torch.Tensor]:
    longest = max(len(sample["bytes"]) for sample in samples)
    rows = [list(sample["bytes"]) for sample in samples]
    return {
        "input_ids": torch.tensor([row + [0] * (longest - len(row)) for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows]),
        "labels": torch.tensor([sample["label"] for sample in samples]),
    }


def f1(predictions: torch.Tensor, references: torch.Tensor, label: int) -> float:
    hits = ((predictions == label) & (references == label)).sum().item()
    return 2 * hits / max(1, (predictions == label).sum().item() + (references == label).sum().item())


def main(output: str) -> None:
    accelerator = Accelerator(
        cpu=True, mixed_precision="no", dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)
    )
    set_seed(7)
    samples = read_samples()
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(3)).tolist()
    train = [samples[i] for i in order[:200]]
    test = [samples[i] for i in order[200:]]
    train_loader = DataLoader(train, shuffle=True, collate_fn=collate, batch_size=16, drop_last=True)
    eval_loader = DataLoader(test, collate_fn=collate, batch_size=16)
    model = Classifier(labels=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    epochs = 2
    total = len(train_loader) * epochs
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))

    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )

    losses, rates, metrics = [], [], []
    for _ in range(epochs):
        model.train()
        for batch in train_loader:
            loss = model(**batch)["loss"]
            losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
            accelerator.backward(loss)
            rates.append(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        predictions, references = [], []
        for batch in eval_loader:
            with torch.no_grad():
                logits = model(**batch)["logits"]
            predicted, truth = accelerator.gather_for_metrics((logits.argmax(dim=-1), batch["labels"]))
            predictions.append(predicted)
            references.append(truth)
        predicted, truth = torch.cat(predictions), torch.cat(references)
        assert len(truth) == len(test)
        metrics.append(
            {
                "accuracy": (predicted == truth).float().mean().item(),
                "f1": [f1(predicted, truth, label) for label in range(3)],
            }
        )
    if accelerator.is_main_process:
        Path(output).write_text(json.dumps({"losses": losses, "rates": rates, "metrics": metrics}))
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
