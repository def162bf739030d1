"""Measure what a training step costs on an XLA device through zero_plugin, against a loop by hand for torch_xla.

All contenders have the same model and data. They train in turns, an epoch each, in reverse order every other round. A
ratio is the median over the rounds of a contender's time over the time of the loop by hand in the same round; ± is half
the distance between the quartiles. A second copy of the loop by hand shows the measurement's noise. `programs` is the
number of programs that XLA compiled for a contender in its first epoch, and in all later ones.

The loop by hand is torch_xla's own: `MpDeviceLoader`, which runs the recorded operations before each batch, and
`xm.optimizer_step`. It steps whatever the gradients are. zero_plugin, as on every path, first checks whether they are
finite, which waits for them. Both therefore run with and without that check. `by hand, checked` runs the recorded
operations, reads whether the gradients are finite, and steps if they are. `bf16.check_grad_overflow: false` removes the
check from zero_plugin.

No contender clips. Each one has its own learning rate and second beta, because torch_xla caches numbers that it has
recently sent to the device. With the same numbers, a contender would profit from another one's.

`--clock cpu` takes the process's own processor time, which does not include other programs on the machine.

    PJRT_DEVICE=CPU python benchmarks/xla.py --width 1024 --pairs 15
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as metrics
from pairs import Timings, describe_run, take_turns
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch_xla.distributed.parallel_loader import MpDeviceLoader

from zero_plugin import Accelerator

BARE, AGAIN, CHECKED = "by hand", "by hand again", "by hand, checked"
OURS, UNCHECKED = "zero_plugin", "zero_plugin, unchecked"
LAYERS, BATCH, LR = 4, 64, 1e-3
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}

Epoch = Callable[[], None]


def make_model(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(LAYERS)))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def adamw(model: nn.Module, number: int) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LR * (1 + 1e-4 * number), betas=(0.9, 0.999 - 1e-6 * number))


def by_hand(model: nn.Module, data: TensorDataset, number: int, *, checked: bool = False) -> Epoch:
    device = torch_xla.device()
    model = model.to(device)
    optimizer = adamw(model, number)
    loader = MpDeviceLoader(DataLoader(data, batch_size=BATCH), device)

    def train() -> None:
        for x, y in loader:
            with torch.autocast("xla", torch.bfloat16):
                loss = loss_of(model, x, y)
            loss.backward()
            if not checked or are_finite(model):
                xm.optimizer_step(optimizer)
            optimizer.zero_grad()

    return train


def are_finite(model: nn.Module) -> bool:
    finite = torch.stack([p.grad.isfinite().all() for p in model.parameters() if p.grad is not None]).all()
    torch_xla.sync()  # without it, reading would run forward and backward, and the step would run them again
    return bool(finite)


def through_zero_plugin(model: nn.Module, data: TensorDataset, number: int, *, checked: bool) -> Epoch:
    deepspeed = {"bf16": {"enabled": True, "check_grad_overflow": checked}}
    accelerator = Accelerator(
        config={"distributed_type": "TPU", "scheduler_counts": "steps", "deepspeed_config": deepspeed}
    )
    optimizer: Any = adamw(model, number)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=BATCH))

    def train() -> None:
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, x, y))
                optimizer.step()
                optimizer.zero_grad()

    return train


def count_programs() -> int:
    compiled = metrics.metric_data("CompileTime")
    return int(compiled[0]) if compiled else 0


def measure(width: int, steps: int, pairs: int, clock: Callable[[], float]) -> tuple[Timings, dict[str, list[int]]]:
    """Return the seconds of each contender's epochs, and the programs compiled in its first and its later ones."""
    samples = torch.randn(steps * BATCH, width)
    data = TensorDataset(samples, samples.roll(1))
    model = make_model(width)
    contenders = {
        OURS: through_zero_plugin(copy.deepcopy(model), data, 1, checked=True),
        UNCHECKED: through_zero_plugin(copy.deepcopy(model), data, 2, checked=False),
        BARE: by_hand(copy.deepcopy(model), data, 3),
        CHECKED: by_hand(copy.deepcopy(model), data, 4, checked=True),
        AGAIN: by_hand(copy.deepcopy(model), data, 5),
    }
    programs: dict[str, list[int]] = {name: [] for name in contenders}

    def timed(name: str, train: Epoch) -> Epoch:
        def epoch() -> None:
            before = count_programs()
            train()
            torch_xla.sync(wait=True)
            programs[name].append(count_programs() - before)

        return epoch

    epochs = {name: timed(name, contenders[name]) for name in (BARE, OURS, UNCHECKED, CHECKED, AGAIN)}
    timings = take_turns(epochs, pairs, warmup=2, clock=clock)
    return timings, {name: [made[0], sum(made[1:])] for name, made in programs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=int, default=1024, help=f"of each of the {LAYERS} layers")
    parser.add_argument("--steps", type=int, default=10, help="steps per epoch")
    parser.add_argument("--pairs", type=int, default=15, help="rounds")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="the clock of the timings")
    options = parser.parse_args()
    print(describe_run("torch", "torch_xla"), f"PJRT_DEVICE={os.environ.get('PJRT_DEVICE', '')}", sep=", ")
    rounds = f"{options.pairs} rounds of {options.steps} steps, {options.clock} time"
    print(f"{LAYERS} layers of {options.width}, batches of {BATCH}, bf16; {rounds}")
    timings, programs = measure(options.width, options.steps, options.pairs, CLOCKS[options.clock])
    print("| contender | ms per step | ratio to by hand | to by hand, checked | programs, first epoch | later |")
    print("|---|--:|--:|--:|--:|--:|")
    for name in timings:
        seconds = 1000 * timings.seconds(name) / options.steps
        ratios = " | ".join(f"{timings.ratio(name, b):.3f} ± {timings.spread(name, b):.3f}" for b in (BARE, CHECKED))
        print(f"| {name} | {seconds:.2f} | {ratios} | {programs[name][0]} | {programs[name][1]} |")


if __name__ == "__main__":
    main()
