"""Imports checkpoints of real DeepSpeed engines and resumes from them: STORE RANK WORLD FOLDER CASES.

CASES is a JSON list. Each case has a `name`, the engine's `zero` section and `precision`, the number of parameter
`groups`, and the `path` that resumes from the imported checkpoint. An optional `universal` lists the stages at which an
engine resumes from the import's export. Losses and values are written into a folder with the case's name.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from device import process_group
from paths import own_batch, running
from safetensors.torch import save_file
from torch import Tensor, nn

from zero_plugin.checkpoint.convert import open_source
from zero_plugin.checkpoint.convert.write import write_checkpoint, write_universal
from zero_plugin.distributed import collectives

SAVED_AFTER, STEPS = 3, 6


class Net(nn.Module):
    """A model with odd sizes, ties, a frozen layer, a scalar parameter and a buffer: [batch, 8] → [batch, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 33)
        self.one = nn.Linear(33, 33, bias=False)
        self.two = nn.Linear(33, 33, bias=False)
        self.two.weight = self.one.weight
        self.frozen = nn.Linear(33, 31).requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(1))
        self.last = nn.Linear(31, 4)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        x = torch.tanh(self.first(x.to(self.gain.dtype)))
        return self.last(self.gain * torch.tanh(self.frozen(self.two(torch.tanh(self.one(x))))))


def groups_of(net: nn.Module, count: int) -> list[dict[str, Any]]:
    """Return one parameter group, or two: matrices with weight decay, and the rest with another learning rate."""
    trained = [p for p in net.parameters() if p.requires_grad]
    if count == 1:
        return [{"params": trained, "weight_decay": 0.1}]
    matrices, others = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}]


def make(seed: int, count: int, offloads: bool) -> tuple[nn.Module, Any, Any]:
    """Create model, optimizer and learning-rate scheduler."""
    torch.manual_seed(seed)
    net = Net()
    if offloads:
        optimizer: Any = deepspeed.ops.adam.DeepSpeedCPUAdam(groups_of(net, count), lr=1e-2, weight_decay=0.0)
    else:
        optimizer = torch.optim.AdamW(groups_of(net, count), lr=1e-2, weight_decay=0.0)
    return net, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * STEPS)


def engine_for(case: dict[str, Any], seed: int, **further: Any) -> Any:
    """Create a bare DeepSpeed engine."""
    offloads = "offload_optimizer" in case["zero"]
    net, optimizer, schedule = make(seed, case["groups"], offloads)
    config = {
        "train_micro_batch_size_per_gpu": 8 // dist.get_world_size(),
        "gradient_clipping": 0.0,
        "zero_optimization": case["zero"],
        "bf16": {"enabled": case["precision"] == "bf16"},
        **further,
    }
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=optimizer, lr_scheduler=schedule, config=config, dist_init_required=False
    )
    return engine


def train(model: Any, step: Callable[[Tensor], None], first: int, last: int) -> list[float]:
    """Train. Return the mean losses over all processes."""
    losses = []
    for number in range(first, last):
        x, y = own_batch(number)
        loss = (model(x).float() - y).square().mean()
        step(loss)
        losses.append(float(collectives.reduce(loss.detach())))
    return losses


def step_of(engine: Any) -> Callable[[Tensor], None]:
    """Return a function that runs backward and step of a bare engine."""

    def step(loss: Tensor) -> None:
        engine.backward(loss)
        engine.step()

    return step


def write_source(case: dict[str, Any], folder: Path) -> list[float]:
    """Train, save, write the engine's own full values, and continue. Return the later losses."""
    engine = engine_for(case, seed=0)
    train(engine, step_of(engine), 0, SAVED_AFTER)
    engine.save_checkpoint(folder / "deepspeed", tag="here")
    values: dict[str, Tensor] = {}
    if case["zero"]["stage"] in (1, 2):  # otherwise DeepSpeed finds only the states of its first step
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    # DeepSpeed's safe_get_full_* ignore the order of round_robin_gradients and return wrong values.
    has_access = case["zero"]["stage"] > 0 and not case["zero"].get("round_robin_gradients")
    for name, p in engine.module.named_parameters():
        if p.requires_grad and has_access:
            values[f"master/{name}"] = safe_get_full_fp32_param(p)
            for key in ("exp_avg", "exp_avg_sq"):
                values[f"{key}/{name}"] = safe_get_full_optimizer_state(p, key)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        for name, tensor in (*engine.module.named_parameters(), *engine.module.named_buffers()):
            values[f"weight/{name}"] = tensor.detach().clone()
    if dist.get_rank() == 0:
        save_file({name: tensor.clone().contiguous() for name, tensor in values.items()}, folder / "values.safetensors")
    losses = train(engine, step_of(engine), SAVED_AFTER, STEPS)
    engine.destroy()
    return losses


def go_on(case: dict[str, Any], folder: Path) -> tuple[list[float], list[str]]:
    """Load the imported checkpoint on another path, into other initial weights, and resume."""
    with running(case["path"], mixed_precision="bf16" if case["precision"] == "bf16" else "no") as accelerator:
        net, optimizer, schedule = make(1, case["groups"], offloads=False)
        model, optimizer, schedule = accelerator.prepare(net, optimizer, schedule)
        report = accelerator.load_state(folder / "imported", verify=True)
        assert report.steps == SAVED_AFTER, report

        def step(loss: Tensor) -> None:
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

        return train(model, step, SAVED_AFTER, STEPS), report.not_restored


def go_on_universal(case: dict[str, Any], folder: Path, stage: int) -> list[float]:
    """Load the export into a bare engine and resume."""
    other = {**case, "zero": {"stage": stage}}
    engine = engine_for(other, seed=0, checkpoint={"load_universal": True})  # frozen weights are not read
    path, _ = engine.load_checkpoint(folder / "universal")
    assert path is not None
    assert engine.global_steps == SAVED_AFTER
    losses = train(engine, step_of(engine), SAVED_AFTER, STEPS)
    engine.destroy()
    return losses


def run_case(case: dict[str, Any], folder: Path) -> None:
    """Run one case (see the module docstring)."""
    folder.mkdir(exist_ok=True)
    result: dict[str, Any] = {"engine": write_source(case, folder)}
    dist.barrier()
    if dist.get_rank() == 0:
        source = open_source(folder / "deepspeed")
        options: dict[str, Any] = {"overwrite": False, "progress": lambda _: None}
        write_checkpoint(source, folder / "imported", max_shard_bytes=2**31, **options)
        result["notes"] = source.notes
        if case.get("universal"):
            write_universal(open_source(folder / "imported"), folder / "universal", **options)
    dist.barrier()
    result["imported"], result["not_restored"] = go_on(case, folder)
    result["universal"] = {stage: go_on_universal(case, folder, stage) for stage in case.get("universal", ())}
    if dist.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps(result))


def main() -> None:
    """Run every case in one process group."""
    store, rank, world, folder, cases = sys.argv[1:6]
    with process_group(store, rank, world):
        deepspeed.init_distributed("gloo")
        for number, case in enumerate(json.loads(cases)):
            print(f"=== {case}", flush=True)
            run_case(case, Path(folder) / case["name"])
            if number == 0:
                gc.collect()
                gc.freeze()  # otherwise every end_training() walks all objects that the imports made


if __name__ == "__main__":
    main()
