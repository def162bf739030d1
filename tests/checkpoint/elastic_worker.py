"""Trains on one layout after another, going on from checkpoints of others: STORE RANK WORLD FOLDER TASKS.

TASKS is a JSON list. Each task has a `name`; the `path` to train on; the `precision`; and `load`, the name of the task
whose checkpoint it goes on from, or null: then it trains from the start, and writes a checkpoint on the way. It writes
the losses after that point, learning rates and weights, in its name.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
sys.path.insert(0, str(Path(__file__).parent.parent / "strategies"))

import cpuinfo
import torch
import torch.distributed as dist
from paths import loss_of, own_batch, running, weights
from safetensors.torch import save_file
from torch import Tensor, nn

from zero_plugin import collectives

cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)  # DeepSpeed's CPU optimizers ask, a second each time

SAVED_AFTER, STEPS = 3, 6


class Net(nn.Module):
    """Odd sizes, tied weights, a frozen layer, a scalar parameter and a buffer: [batch, 8] → [batch, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 33)
        self.one = nn.Linear(33, 33, bias=False)
        self.two = nn.Linear(33, 33, bias=False)
        self.two.weight = self.one.weight
        self.frozen = nn.Linear(33, 33).requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(1))
        self.last = nn.Linear(33, 4)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        x = torch.tanh(self.first(x))
        return self.last(self.gain * torch.tanh(self.frozen(self.two(torch.tanh(self.one(x))))))


def run_task(task: dict[str, Any], folder: Path) -> None:
    """One task, see above."""
    with running(task["path"], mixed_precision=task.get("precision", "no")) as accelerator:
        torch.manual_seed(0 if task["load"] is None else 1)  # what is equal in the end was loaded
        net = Net()
        decayed = [p for p in net.parameters() if p.requires_grad and p.ndim > 1]
        others = [p for p in net.parameters() if p.requires_grad and p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}]
        adamw = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adamw, 2 * STEPS)
        model, optimizer, schedule = accelerator.prepare(net, adamw, cosine)
        first = 0
        if task["load"] is not None:
            report = accelerator.load_state(folder / task["load"] / "checkpoint", verify=True)
            assert all("the random states of process 1" in line for line in report.not_restored), report
            first = report.steps
            assert first == SAVED_AFTER
        own = folder / task["name"]
        own.mkdir(exist_ok=True)
        losses = []
        for step in range(first, STEPS):
            if step == SAVED_AFTER and task["load"] is None:
                accelerator.save_state(own / "checkpoint")
            loss = loss_of(model, own_batch(step))
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(float(collectives.reduce(loss.detach())))
        state = weights(accelerator, model)
        if accelerator.is_main_process:
            save_file({name: tensor.clone() for name, tensor in state.items()}, own / "weights.safetensors")
            lrs = [group["lr"] for group in optimizer.param_groups]
            (own / "result.json").write_text(json.dumps({"losses": losses[SAVED_AFTER - first :], "lrs": lrs}))


def main() -> None:
    """Run every task, in one group of processes."""
    store, rank, world, folder, tasks = sys.argv[1:6]
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world), timeout=timedelta(seconds=30)
    )
    for number, task in enumerate(json.loads(tasks)):
        print(f"=== {task}", flush=True)
        run_task(task, Path(folder))
        if number == 0:
            gc.collect()
            gc.freeze()  # else every end_training() walks all that the imports made
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
