"""Trains two epochs, saves often, and resumes: OUT STAGE PAUSE [kill RANK STEP].

The fault, SIGKILL, hits one rank when it first reaches that many steps. With `again` instead of a fault, the same
training runs once more from the start.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from zero_plugin import Accelerator, ProjectConfiguration


def main(out: Path, stage: int, pause: float, rank: int = -1, at: int = -1) -> None:
    """Write the sum of the final weights, bit by bit, and the number of steps of each start."""
    section = {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True} if stage else None
    project = ProjectConfiguration(out, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(config=section, project_config=project)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.2), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    x = torch.randn(64, 8)
    y = x[:, :4].sin()
    loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    resumed = accelerator.resume()
    steps = resumed.steps if resumed else 0
    os.write(1, f"started at {steps}\n".encode())
    for _ in range(resumed.epochs[0] if resumed else 0, 2):
        for features, targets in loader:
            loss = torch.nn.functional.mse_loss(model(features), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            time.sleep(pause)
            if accelerator.process_index == rank and steps == at and not (out / "fault").exists():
                (out / "fault").touch()
                os.kill(os.getpid(), 9)
            if accelerator.stop_requested():
                accelerator.save_state()
                os.write(1, f"saved at {steps}\n".encode())
                return
            if steps % 3 == 0:
                accelerator.save_state()
    model.eval()
    with torch.no_grad():  # a start may find no step left to take
        final = accelerator.gather(torch.nn.functional.mse_loss(model(x), y)).tolist()
    whole = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        weights = [p.double().sum().item() for p in whole.values()]
        (out / "final.json").write_text(json.dumps([steps, final, weights]))
    accelerator.end_training()


if __name__ == "__main__":
    folder, stage, pause = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    main(folder, stage, pause, *map(int, sys.argv[5:]))
    if "again" in sys.argv:
        main(folder / "again", stage, pause)
