"""Trains on three processes, of which one kills itself: PATH PLACE FOLDER RANK [SECONDS].

The environment describes the group, and no launcher watches. The process dies at the first PLACE that is reached
SECONDS after the start of its training.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
from torch import nn

from zero_plugin import Accelerator
from zero_plugin.utils import ProjectConfiguration


def main(path: str, place: str, folder: str, victim: str, seconds: str = "0") -> None:
    """Train until all processes have ended."""
    dies = os.environ["RANK"] == victim
    began, files = time.monotonic(), 0

    def reach(where: str) -> None:
        if dies and where == place and time.monotonic() - began >= float(seconds):
            os.kill(os.getpid(), signal.SIGKILL)

    def count_files(fsync: Any) -> Any:
        def counted(descriptor: int) -> None:
            nonlocal files
            files += 1
            reach(f"file-{files}")
            reach(f"background-{files}")
            fsync(descriptor)

        return counted

    os.fsync = count_files(os.fsync)
    kind = "DEEPSPEED" if path.startswith("zero") else "MULTI_CPU"
    section = {"zero_optimization": {"stage": int(path[-1])}} if kind == "DEEPSPEED" else {}
    config = {"distributed_type": kind, "use_cpu": True, "deepspeed_config": section}
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(config=config, project_config=project)
    reach("prepare")
    layer = nn.Linear(8, 8)
    model, optimizer = accelerator.prepare(layer, torch.optim.AdamW(layer.parameters(), lr=1e-3))
    layer.weight.register_hook(lambda _: reach("backward"))
    while True:
        reach("forward")
        loss = model(torch.ones(2, 8)).square().mean()
        accelerator.backward(loss)
        reach("step")
        optimizer.step()
        optimizer.zero_grad()
        reach("gather")
        accelerator.gather(loss.detach())
        reach("wait")
        accelerator.wait_for_everyone()
        reach("weights")
        accelerator.get_state_dict(model)
        reach("save")
        files = 0
        accelerator.save_state(asynchronous=place.startswith("background"))
        accelerator.wait_for_save()
        if place == "end" and time.monotonic() - began >= float(seconds):
            break
    reach("end")


if __name__ == "__main__":
    main(*sys.argv[1:])
