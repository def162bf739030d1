"""A plain PyTorch loop: a small network learns to read handwritten digits, under ZeRO-2 on two processes.

pip install '.[examples]'  # once, in a clone of zero_plugin
zero-plugin launch --config zero2 examples/plain_loop.py

It needs scikit-learn for the digits. With `--config cpu` the same script runs on DDP, and with plain `python` on one
device.
"""

try:
    from sklearn.datasets import load_digits

    from zero_plugin import Accelerator, set_seed
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: type  pip install '.[examples]'  in a clone of zero_plugin") from None

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4


def main() -> None:
    """Train, then measure on held-out digits."""
    accelerator = Accelerator()
    set_seed(0)

    digits = load_digits()
    pictures, labels = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    loader = DataLoader(TensorDataset(pictures[:1500], labels[:1500]), batch_size=16, shuffle=True)
    held_out = DataLoader(TensorDataset(pictures[1500:], labels[1500:]), batch_size=64)

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    scheduler = OneCycleLR(optimizer, max_lr=5e-3, total_steps=EPOCHS * len(loader))
    loss_function = nn.CrossEntropyLoss()
    model, optimizer, loader, held_out, scheduler = accelerator.prepare(model, optimizer, loader, held_out, scheduler)

    for epoch in range(EPOCHS):
        model.train()
        losses = []
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = loss_function(model(inputs), targets)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        mean = accelerator.reduce(torch.stack(losses).mean(), "mean")
        accelerator.print(f"epoch {epoch}: loss {mean.item():.4f}")

    model.eval()
    right = []
    with torch.no_grad():
        for inputs, targets in held_out:
            right.append(accelerator.gather_for_metrics(model(inputs).argmax(1) == targets))
    share = torch.cat(right).float().mean().item()
    accelerator.print(f"{share:.1%} of {len(torch.cat(right))} held-out digits are right")
    accelerator.end_training()


if __name__ == "__main__":
    main()
