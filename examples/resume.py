"""Stop anywhere and continue: a run ends inside an epoch, and the next run continues as though it had not ended.

pip install '.[examples]'  # once, in a clone of zero_plugin
zero-plugin launch --config zero2 examples/resume.py --stop_after 70
zero-plugin launch --config zero3 examples/resume.py

The second command may use another stage and another number of processes. It needs scikit-learn for the digits.
"""

import argparse
from pathlib import Path

try:
    from sklearn.datasets import load_digits

    from zero_plugin import Accelerator, set_seed
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: type  pip install '.[examples]'  in a clone of zero_plugin") from None

import torch
from torch import nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 3
CHECKPOINT = Path("examples_output/resume")


def main() -> None:
    """Load the checkpoint if it exists, and train until the end or until `--stop_after`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--stop_after", type=int, metavar="STEPS", help="save a checkpoint after this many steps and end"
    )
    stop_after = parser.parse_args().stop_after

    accelerator = Accelerator()
    set_seed(0)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data).float() / 16, torch.tensor(digits.target))
    loader = DataLoader(data, batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = AdamW(model.parameters(), lr=2e-3)
    loss_function = nn.CrossEntropyLoss()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    first_epoch, done_batches = 0, 0
    if CHECKPOINT.exists() and not stop_after:
        report = accelerator.load_state(CHECKPOINT)
        first_epoch, done_batches = report.epochs[0], report.batches[0]
        accelerator.print(f"resumes in epoch {first_epoch} after batch {done_batches}")

    steps = 0
    for epoch in range(first_epoch, EPOCHS):
        # load_state has restored the order of the interrupted epoch, which continues after its last batch.
        batches = accelerator.skip_first_batches(loader, done_batches) if epoch == first_epoch else loader
        for inputs, targets in batches:
            with accelerator.accumulate(model):
                loss = loss_function(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            steps += 1
            if steps % 10 == 0:
                accelerator.print(f"epoch {epoch}: loss {accelerator.reduce(loss.detach(), 'mean').item():.4f}")
            if steps == stop_after:
                accelerator.save_state(CHECKPOINT)
                accelerator.print(f"stopped in epoch {epoch}; the checkpoint is {CHECKPOINT}")
                accelerator.end_training()
                return
    accelerator.end_training()


if __name__ == "__main__":
    main()
