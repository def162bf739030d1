"""Trains on one layout after another and resumes from checkpoints of other layouts: STORE RANK WORLD FOLDER TASKS.

TASKS is a JSON list. Each task has a `name`, the `layout` and `precision` of the training, the hidden size `width` of
the model, and whether the model has LoRA. `load` is the name of the task whose checkpoint is loaded, or null. A task
with null trains from the start and writes a checkpoint on the way. Each task writes a file with its name: the losses
after that point, learning rates, digests of the final weights, and all problems found.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from device import process_group
from offloading import files_of
from paths import global_batch, loss_of, running
from safetensors.torch import load_file
from torch import Tensor, nn

from zero_plugin.checkpoint.objects import read_nested
from zero_plugin.distributed import collectives

SAVED_AFTER, STEPS = 2, 5  # at the third step DeepSpeed's CPU Adam could use another bias correction
SAMPLES = 12  # of all processes together: 1 to 4 processes get equal parts
STATES = ("exp_avg", "exp_avg_sq")


class Experts(nn.Module):
    """Layer that adds to each row the output of one of three experts: [batch, 8] → [batch, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3, bias=False)
        nn.init.eye_(self.router.weight)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        shares = torch.softmax(self.router(x), -1)
        chosen = shares.argmax(-1)
        added = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            if (rows := chosen == index).any():
                added[rows] = (expert(x[rows]) * shares[rows, index : index + 1]).to(x.dtype)
        return x + added


class Net(nn.Module):
    """A model with experts, odd sizes, tied and frozen weights, a scalar and buffers: [batch, 8] → [batch, 4]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = Experts()
        self.first = nn.Linear(8, 33)
        self.one = nn.Linear(33, 33, bias=False)
        self.two = nn.Linear(33, 33, bias=False)
        self.two.weight = self.one.weight
        self.up = nn.Linear(33, width)
        self.large = nn.Linear(width, 1024)
        self.frozen = nn.Linear(1024, width).requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(1))
        self.last = nn.Linear(width, 4)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        x = torch.tanh(self.first(self.experts(x)))
        x = torch.tanh(self.up(torch.tanh(self.two(torch.tanh(self.one(x))))))
        x = torch.tanh(self.frozen(torch.tanh(self.large(x))))
        return self.last(self.gain * x) * self.scale


def make_net(width: int, *, lora: bool) -> nn.Module:
    """Create the model of all tasks. With `lora`, the frozen layer gets adapters, as in peft."""
    net = Net(width)
    if lora:
        import peft

        trained = [p for p in net.parameters() if p.requires_grad]
        peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=["frozen"]), net)
        for p in trained:
            p.requires_grad_(True)
    return net


def own_batch(step: int) -> tuple[Tensor, Tensor]:
    """Return this process's part of a batch. With three or more processes, none sees rows of all experts."""
    x, y = global_batch(step, SAMPLES)
    x[:, :3] = 0.1 * x[:, :3] + 2 * torch.eye(3).repeat_interleave(SAMPLES // 3, 0)
    world, rank = dist.get_world_size(), dist.get_rank()
    return x.chunk(world)[rank], y.chunk(world)[rank]


def config_of(layout: str, swap: Path) -> tuple[str, dict[str, Any] | None]:
    """Return the path that runs a layout, and the additions to its DeepSpeed configuration."""
    if layout != "zero3-nvme":
        return layout, None
    nvme = {"device": "nvme", "nvme_path": str(swap)}
    section = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "sub_group_size": 500_000,
        "offload_optimizer": nvme,
        "offload_param": {**nvme, "max_in_cpu": 0, "buffer_size": 2_500_000},
    }
    return "zero3", {"zero_optimization": section}


def stored_tensors(checkpoint: Path) -> dict[str, dict[str, Tensor]]:
    """Return all tensors of a checkpoint: `model`, `masters` or a state → name → tensor."""
    files = [checkpoint / "model.safetensors", *(checkpoint / "optimizer").glob("*.safetensors")]
    return {file.stem: load_file(file) for file in files}


def differing(found: dict[str, dict[str, Tensor]], stored: dict[str, dict[str, Tensor]]) -> Iterator[str]:
    """Yield bitwise differences from `stored`. Weights and masters are compared with the most precise values."""
    precise = {**stored["model"], **stored.get("masters", {})}
    for kind, tensors in found.items():
        wanted = precise if kind in ("model", "masters") else stored.get(kind, {})
        if kind != "masters" and tensors.keys() != wanted.keys():
            yield f"{kind} is of {sorted(tensors.keys() ^ wanted.keys())} too, or not"
        for name in tensors.keys() & wanted.keys():
            if not torch.equal(tensors[name], wanted[name].to(tensors[name].dtype)):
                yield f"{kind} of {name} has other values"


def optimizer_tensors(module: nn.Module, optimizer: Any, layout: str) -> dict[str, dict[str, Tensor]]:
    """Gather unpartitioned masters and states from DeepSpeed's functions or the torch optimizer. Collective."""
    found: dict[str, dict[str, Tensor]] = {kind: {} for kind in ("masters", *STATES)}
    for name, p in module.named_parameters():
        if not p.requires_grad:
            continue
        if layout in ("single", "ddp", "zero0"):
            found |= {kind: {**found[kind], name: optimizer.state[p][kind]} for kind in STATES}
        else:
            found["masters"][name] = safe_get_full_fp32_param(p).clone()
            found |= {kind: {**found[kind], name: safe_get_full_optimizer_state(p, kind).clone()} for kind in STATES}
    return found


def whole_weights(optimizer: Any) -> dict[str, Tensor]:
    """Return every weight and buffer, frozen weights included. Collective."""
    return {name: tensor.clone() for name, tensor in optimizer.session.named_tensors()}


def described(checkpoint: Path) -> tuple[Any, ...]:
    """Return the optimizer's steps, and settings and members of its groups."""
    optimizer = read_nested(checkpoint / "training")["models"][0]["optimizer"]
    settings = ("lr", "initial_lr", "betas", "eps", "weight_decay")
    groups = [(set(group["params"]), [group["settings"][key] for key in settings]) for group in optimizer["groups"]]
    return optimizer["scalars"], optimizer["applied_steps"], groups


def find_problems(accelerator: Any, module: nn.Module, optimizer: Any, task: dict[str, Any], folder: Path) -> list[str]:
    """Compare with the checkpoint that was just loaded. The main process returns the differences. Collective."""
    source, again = folder / task["load"] / "checkpoint", folder / task["name"] / "again"
    states = {"model": whole_weights(optimizer)}
    if not (task["layout"] == "zero0" and task["precision"] == "bf16"):  # DeepSpeed's wrapper exposes no names there
        states |= optimizer_tensors(module, optimizer.optimizer, task["layout"])
    accelerator.save_state(again)
    problems = []
    if accelerator.is_main_process:
        stored, saved = stored_tensors(source), stored_tensors(again)
        problems += [f"in memory: {problem}" for problem in differing(states, stored)]
        problems += [f"saved again: {problem}" for problem in differing(saved, stored)]
        if saved.keys() - {"masters"} != stored.keys() - {"masters"}:
            problems.append(f"{sorted(saved)} were saved again of {sorted(stored)}")
        problems += [] if described(source) == described(again) else ["numbers or groups of the optimizer differ"]
        shutil.rmtree(again)
    dist.barrier()
    return problems


def find_unswapped(module: nn.Module, precision: str, swap: Path) -> list[str]:
    """Return what should be on NVMe and is not. Collective."""
    files, width = files_of(swap), 2 if precision == "bf16" else 4
    world = dist.get_world_size()
    large = {name: p.ds_numel // world for name, p in module.named_parameters() if p.ds_numel // world * width >= 2**20}
    trained = large["large.weight"]
    least = {f"{'bfloat16' if width == 2 else 'float32'}params": sum(large.values()) * width}
    least |= dict.fromkeys(("master", *STATES), 4 * trained)
    problems = [] if len(large) == 2 else [f"{sorted(large)} are swapped, not two weights"]
    return problems + [f"{kind}: {files.get(kind, 0)} bytes" for kind in least if files.get(kind, 0) < least[kind]]


def run_task(task: dict[str, Any], folder: Path) -> None:
    """Run one task (see the module docstring)."""
    own, swap = folder / task["name"], folder / "swap"
    own.mkdir(exist_ok=True)
    swap.mkdir(exist_ok=True)
    path, section = config_of(task["layout"], swap)
    with running(path, deepspeed=section, mixed_precision=task["precision"]) as accelerator:
        torch.manual_seed(0 if task["load"] is None else 1)  # if the final states are equal, they were loaded
        net = make_net(task["width"], lora=task["lora"])
        decayed = [p for p in net.parameters() if p.requires_grad and p.ndim > 1]
        others = [p for p in net.parameters() if p.requires_grad and p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}]
        adamw = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.0)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adamw, 2 * STEPS)
        model, optimizer, schedule = accelerator.prepare(net, adamw, cosine)
        first, problems = 0, []
        if task["load"] is not None:
            report = accelerator.load_state(folder / task["load"] / "checkpoint", verify=True)
            problems += [line for line in report.not_restored if not line.startswith("the random states of process")]
            first = report.steps
            assert first == SAVED_AFTER
            problems += find_problems(accelerator, net, optimizer, task, folder)
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
        if task["layout"] == "zero3-nvme":
            problems += find_unswapped(net, task["precision"], swap)
        state = whole_weights(optimizer)
        everyones = [problem for found in collectives.gather_object([problems]) for problem in found]
        if accelerator.is_main_process:
            result = {
                "losses": losses[SAVED_AFTER - first :],
                "lrs": [group["lr"] for group in optimizer.param_groups],
                "digests": {name: digest(tensor) for name, tensor in state.items()},
                "problems": everyones,
            }
            (own / "result.json").write_text(json.dumps(result))


def digest(tensor: Tensor) -> str:
    """Return a digest of the tensor's bytes."""
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()


def main() -> None:
    """Run every task in one process group."""
    store, rank, world, folder, tasks = sys.argv[1:6]
    with process_group(store, rank, world):
        for number, task in enumerate(json.loads(tasks)):
            print(f"=== {task}", flush=True)
            run_task(task, Path(folder))
            if number == 0:
                gc.collect()
                gc.freeze()  # otherwise every end_training() walks all objects that the imports made


if __name__ == "__main__":
    main()
