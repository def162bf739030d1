"""A training script that ends something before the package does: STORE RANK WORLD PATH HOW FOLDER.

With `-` as STORE, the environment describes the group.
"""

from __future__ import annotations

import builtins
import gc
import logging
import os
import shutil
import sys
import threading
import time
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from job import configuration
from paths import FURTHER, ZERO
from torch import nn

from zero_plugin import Accelerator
from zero_plugin.utils import InitProcessGroupKwargs, ProjectConfiguration


def main(store: str, rank: str, world: str, path: str, how: str, folder: str) -> None:
    """Train two steps, then end in the requested way."""
    handlers = []
    if store != "-":
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        handlers.append(InitProcessGroupKwargs(init_method=f"file://{store}"))
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
    nvme = str(Path(folder, "nvme")) if path == "nvme" else ""
    log = {"log_with": "jsonl"} if how == "tracker" else {}
    config = configuration("nvme" if nvme else "ddp", nvme)
    if path in {**ZERO, **FURTHER}:
        zero = {"zero_optimization": {**ZERO, **FURTHER}[path]}
        config = {"distributed_type": "DEEPSPEED", "use_cpu": True, "deepspeed_config": zero}
    accelerator = Accelerator(config=config, project_config=project, kwargs_handlers=handlers, **log)
    if log:
        accelerator.init_trackers("run")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 1024), nn.Linear(1024, 4)) if nvme else nn.Linear(8, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    def step() -> None:
        accelerator.backward(model(torch.ones(2, 8)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    print("trained", flush=True)
    if "dropped" not in how:  # as in a script without functions, whose objects live until the end
        builtins.kept = accelerator, model, optimizer  # type: ignore[attr-defined]
    if how == "group":
        dist.destroy_process_group()
    elif how == "group, all dropped":
        dist.destroy_process_group()
        del model, optimizer, accelerator, step
        gc.collect()
    elif how == "group, end_training":
        dist.destroy_process_group()
        accelerator.end_training()
        accelerator.end_training()
    elif how == "engine, group":
        model.destroy()
        dist.destroy_process_group()
    elif how == "save, group":
        accelerator.save_state(asynchronous=True)
        dist.destroy_process_group()
    elif how == "failing save, group":
        accelerator.save_state()
        os.fsync = full_disk
        accelerator.save_state(asynchronous=True)
        dist.destroy_process_group()
    elif how == "group, save":
        dist.destroy_process_group()
        accelerator.save_state()
    elif how == "group, weights":
        dist.destroy_process_group()
        accelerator.save_model(model, folder)
    elif how == "end_training, gather":
        accelerator.end_training()
        accelerator.gather(torch.ones(1))
    elif how == "group of one":
        if rank == "1":
            dist.destroy_process_group()
        else:
            while True:
                step()
                time.sleep(0.01)
    elif how == "logging":
        logging.shutdown()
    elif how == "tracker":
        for tracker in accelerator.trackers:
            tracker.finish()
    elif how == "folder":
        accelerator.save_state()
        accelerator.wait_for_everyone()
        shutil.rmtree(folder, ignore_errors=True)
    elif how == "nested exit":
        leave()
    elif how == "thread":
        threading.Thread(target=use, args=(model, 0.001), daemon=True).start()
        time.sleep(0.05)
    elif how == "busy thread":
        threading.Thread(target=use, args=(model, 0.0), daemon=True).start()
        time.sleep(0.05)


def full_disk(_: int) -> None:
    """Fail like `os.fsync` on a full disk."""
    raise OSError(28, "No space left on device")


def leave() -> None:
    """End the script from inside a function."""
    sys.exit(0)


def use(model: nn.Module, pause: float) -> None:
    """Compute with the model until the process ends.

    A thread that never pauses is still in torch when Python finalizes. C++ then aborts, as in plain torch.
    """
    while True:
        with torch.no_grad():
            model(torch.ones(1, 8))
        if pause:
            time.sleep(pause)


if __name__ == "__main__":
    main(*sys.argv[1:])
