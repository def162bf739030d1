"""Run parity cases on one path through zero_plugin: STORE RANK WORLD DEVICE PATH CASES OUTPUT NVME."""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = sys.argv[4].removesuffix("-shared")
sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from cases import EPOCHS, PATHS, WITHOUT_CHECKS, Case, case_for, width_for
from device import process_group
from line_contexts import enter_context
from model import code_schedule, make_loader, make_model, parameter_groups

from zero_plugin import Accelerator, DummyOptim, DummyScheduler
from zero_plugin.strategies.torch_optimizers import Lion


def config_of(case: Case, training: dict[str, Any], nvme: str) -> dict[str, Any]:
    """Return the DeepSpeed configuration of a case on a path."""
    config = json.loads(json.dumps(training).replace("NVME", nvme))
    config["gradient_accumulation_steps"] = case.accumulation
    if case.precision == "bf16":
        config["bf16"] = {"enabled": True}
    if case.precision == "fp16":
        config["fp16"] = {"enabled": True, **dict(case.fp16)}
    if case.config_clip is not None:
        config["gradient_clipping"] = case.config_clip
    if case.placeholders:
        name, arguments = case.optimizer
        params = dict.fromkeys(arguments, "auto") | ({"adam_w_mode": False} if name == "Adam" else {})
        config["optimizer"] = {"type": name, "params": params}
        assert case.schedule is not None
        config["scheduler"] = {"type": case.schedule[0], "params": case.schedule[1]}
    return config


def make_real_optimizer(case: Case, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Build the torch optimizer of a case without placeholders."""
    name, arguments = case.optimizer
    kind = Lion if name == "Lion" else getattr(torch.optim, name)
    return kind(parameter_groups(model, arguments["lr"], case.groups), **arguments)


def run(device: str, path: str, case: Case, nvme: str, checks: str) -> dict[str, Any]:
    """Return losses and applied learning rates by step, the norms, and the final weights."""
    training = PATHS[path][1]
    world, zero = dist.get_world_size(), bool(training)
    config: Any = {"deepspeed_config": config_of(case, training, nvme), "scheduler_counts": "steps"}
    config["checks"] = checks
    kind = "MULTI_CPU" if device == "cpu" else "MULTI_GPU"
    config["distributed_type"] = "DEEPSPEED" if zero else kind if world > 1 else "NO"
    config["use_cpu"] = device == "cpu"
    accelerator = Accelerator(config=config)
    model = make_model(width_for(path), case.branch)
    loader = make_loader(8 * case.batches, case.data, 8 // world)
    lr = case.optimizer[1]["lr"]
    if case.placeholders:
        optimizer: Any = DummyOptim(parameter_groups(model, lr, case.groups), **case.optimizer[1])
        scheduler: Any = DummyScheduler(optimizer)
    else:
        optimizer = make_real_optimizer(case, model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, code_schedule)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    losses: list[float] = []
    rates: list[list[float]] = []
    norms: list[float] = []
    scales: list[float] = []
    windows = 0
    criterion = torch.nn.MSELoss()

    def note_step(before: int) -> None:
        nonlocal windows
        if optimizer.applied_steps > before:
            rates.append(lrs)
        if optimizer.acted:
            windows += 1
            scales.append(optimizer.loss_scale)

    for _ in range(EPOCHS):
        for i, (x, y) in enumerate(loader):
            before = optimizer.applied_steps
            lrs = scheduler.get_last_lr()

            def micro_batch(x: Any = x, y: Any = y, i: int = i) -> None:
                loss = criterion(model(x, i % 2 == 1), y)
                accelerator.backward(loss * float("inf") if case.poisons(windows) else loss)
                losses.append(accelerator.gather(loss.detach()).mean().item())

            if case.drop and i % case.accumulation == 0 and optimizer.applied_steps % 3 == 0:
                accelerator.backward(criterion(model(x * 3, i % 2 == 1), y))
                optimizer.zero_grad()
            if case.style == "accumulate" and not case.drop:
                with accelerator.accumulate(model):
                    micro_batch()
                    if case.clip is not None and accelerator.sync_gradients:
                        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), case.clip)))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            elif case.style == "window":
                micro_batch()
                optimizer.acted = False  # the loop does not call step() in every micro-batch
                if (i + 1) % case.accumulation == 0 or i + 1 == case.batches:
                    if case.clip is not None:
                        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), case.clip)))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            else:
                micro_batch()
                if case.clip is not None:
                    norm = float(accelerator.clip_grad_norm_(model.parameters(), case.clip))
                    if norm == norm:
                        norms.append(norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            note_step(before)
    state = accelerator.get_state_dict(model)
    accelerator.end_training()
    return {"losses": losses, "rates": rates, "norms": norms, "scales": scales, "state": state}


def main() -> None:
    """Run every case in one group of processes."""
    store, rank, world, device, path, cases, output, nvme = sys.argv[1:9]
    torch.manual_seed(0)
    # NCCL takes one process per GPU. Processes that share a GPU use gloo.
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    with process_group(store, rank, world, backend=backend):
        for name in cases.split(","):
            gc.collect()
            gc.freeze()  # otherwise every end_training() walks all objects that imports have created so far: 0.2 s
            enter_context(f"{name} on {device} {path}")
            try:
                case = case_for(path, name.removesuffix(WITHOUT_CHECKS))
                result = run(device, path, case, nvme, "off" if name.endswith(WITHOUT_CHECKS) else "all")
            except Exception as error:  # noqa: BLE001 - one failing case must not hide the others
                result = {"error": f"{type(error).__name__}: {error}"}
                traceback.print_exc()
            if rank == "0":
                torch.save(result, Path(output) / f"{name}.pt")
            dist.barrier()


if __name__ == "__main__":
    main()
