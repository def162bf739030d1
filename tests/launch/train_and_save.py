"""Three steps, a save, the end: `train_and_save.py FOLDER`."""

from __future__ import annotations

import sys

import torch

from zero_plugin import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(4, 4)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
for _ in range(3):
    accelerator.backward(model(torch.ones(2, 4)).square().sum())
    optimizer.step()
    optimizer.zero_grad()
accelerator.save_state(sys.argv[1])
