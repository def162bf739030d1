"""Trains at stage 3 with everything on NVMe. Before a step a fault hits the folder. FOLDER FAULT STEP."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch

from zero_plugin import Accelerator


def remove(folder: Path) -> None:
    """Remove the files, as another user of the disk may."""
    shutil.rmtree(folder)


def fill(folder: Path) -> None:
    """Fill the disk."""
    with (folder / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 20))
        except OSError:
            return


def main(folder: Path, fault: str, step: int) -> None:
    """Take four steps with layers that are large enough to be swapped."""
    place = {"device": "nvme", "nvme_path": str(folder)}
    zero = {
        "stage": 3,
        "offload_optimizer": place,
        "offload_param": {**place, "max_in_cpu": 0},
        "sub_group_size": 2_000_000,
        "stage3_param_persistence_threshold": 0,
    }
    accelerator = Accelerator(config={"bf16": {"enabled": True}, "zero_optimization": zero})
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(1536, 1536) for _ in range(3)])
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for number in range(4):
        if number == step and accelerator.is_main_process:
            {"gone": remove, "full": fill}[fault](folder)
        accelerator.wait_for_everyone()
        loss = model(torch.randn(4, 1536, dtype=torch.bfloat16)).float().square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print("trained")
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
