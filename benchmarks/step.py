"""What a training step costs through zero_plugin, against the same loop written by hand on the bare engine.

For each path, processes (gloo on CPUs, NCCL on GPUs) build every contender around the same model, optimizer and
configuration: the loop by hand, a second copy of it, zero_plugin and, where it is installed and can run, Accelerate.
They then train in turns, a block of steps each, and every other round in reverse. A ratio is the median over the rounds
of a contender's time over the hand-written loop's in the same round; ± is half the distance between the quartiles. The
second copy of the hand-written loop shows what difference the measurement sees where there is none.

`--clock cpu` takes the processor time of the first process in place of the wall clock's: what other programs do on the
machine is not in it, nor is what one process waits for the other.

Three loops are timed: the step alone, on one batch that stays on the device; the same fed by a DataLoader (sharded,
batches moved to the device); and that with the gradient norm clipped at 1.

    python benchmarks/step.py --pairs 30 --steps 20 --paths zero2 ddp

The hand-written loop on ZeRO is `engine.backward(loss); engine.step()` on `deepspeed.initialize` with the resolved
configuration that zero_plugin gives its own engine, where clipping is a line of the configuration; zero_plugin's calls
`clip_grad_norm_(model.parameters(), 1.0)` and gets the norm. On DDP and one device the hand-written loop is plain
torch. Accelerate does not run DeepSpeed on CPUs, and takes part there on DDP and one device.
"""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pairs import WIDTH, Timings, describe_run, installed, take_turns
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from zero_plugin import Accelerator, DummyOptim

BARE, AGAIN, OURS, ACCELERATE = "by hand", "by hand again", "zero_plugin", "accelerate"
PATHS: dict[str, dict[str, Any]] = {  # the ZeRO section; nothing for plain torch
    "single": {},
    "ddp": {},
    "zero0": {"stage": 0},
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero2_offload": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "zero3": {"stage": 3},
}
LAYERS, BATCH, LR = 5, 8, 1e-3
WIDTHS = {"tiny": 64, "5M": 1024, "25M": 2240}  # 21 thousand, 5.2 and 25 million parameters
LOOPS = ("step", "loader", "loader + clip")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}

Batches = Iterable[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Contender:
    """A way to train: the loop over some batches, and the loader that would feed it."""

    train: Callable[[Batches], None]
    loader: Batches


def make_model(width: int) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(LAYERS)]
    return nn.Sequential(*layers)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


# ---- the contenders -------------------------------------------------------------------------------------------------


def through_zero_plugin(accelerator: Accelerator, model: nn.Module, data: TensorDataset, clip: bool) -> Contender:
    optimizer: Any = DummyOptim(model.parameters(), lr=LR)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=BATCH))

    def train(batches: Batches) -> None:
        for x, y in batches:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, x, y))
                if clip:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    return Contender(train, loader)


def bare_engine(config: dict[str, Any], model: nn.Module, loader: Batches) -> Contender:
    import deepspeed

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def train(batches: Batches) -> None:
        for x, y in batches:
            engine.backward(loss_of(engine, x, y))
            engine.step()

    return Contender(train, loader)


def bare_torch(model: nn.Module, loader: Batches, device: torch.device, clip: bool) -> Contender:
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)  # what zero_plugin builds from the section
    wrapped = DistributedDataParallel(model) if dist.get_world_size() > 1 else model

    def train(batches: Batches) -> None:
        for x, y in batches:
            loss_of(wrapped, x, y).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return Contender(train, loader)


def accelerates_own(cpu: bool, zero: dict[str, Any] | None) -> Any:
    from accelerate import Accelerator as AcceleratesOwn
    from accelerate import DeepSpeedPlugin
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    return AcceleratesOwn(cpu=cpu, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=copy.deepcopy(zero)) if zero else None)


def through_accelerate(
    cpu: bool, zero: dict[str, Any] | None, model: nn.Module, data: TensorDataset, clip: bool
) -> Contender:
    from accelerate.utils import DummyOptim as AcceleratesDummy

    accelerator = accelerates_own(cpu, zero)
    make: Any = AcceleratesDummy if zero else torch.optim.AdamW
    optimizer: Any = make(model.parameters(), lr=LR)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=BATCH))

    def train(batches: Batches) -> None:
        for x, y in batches:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, x, y))
                if clip:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    return Contender(train, loader)


class MovedByHand:
    """This process's part of the data, on the device."""

    def __init__(self, data: TensorDataset, device: torch.device) -> None:
        self._loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, shuffle=False))
        self._device = device

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in self._loader:
            yield x.to(self._device), y.to(self._device)


# ---- one process ----------------------------------------------------------------------------------------------------


def make_config(zero: dict[str, Any], clip: bool, cpu: bool) -> dict[str, Any]:
    deepspeed: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
    }
    if clip:
        deepspeed["gradient_clipping"] = 1.0
    if zero:
        deepspeed["zero_optimization"] = zero
    kind = "DEEPSPEED" if zero else "NO" if dist.get_world_size() == 1 else "MULTI_CPU" if cpu else "MULTI_GPU"
    return {"distributed_type": kind, "use_cpu": cpu, "scheduler_counts": "steps", "deepspeed_config": deepspeed}


def build_contenders(path: str, width: int, clip: bool, cpu: bool, steps: int) -> tuple[dict[str, Contender], Any]:
    zero = PATHS[path]
    accelerator = Accelerator(config=make_config(zero, clip, cpu))
    model, device = make_model(width), accelerator.device
    samples = torch.randn(steps * BATCH * dist.get_world_size(), width)
    data = TensorDataset(samples, samples.roll(1))
    models = {name: copy.deepcopy(model) for name in (BARE, AGAIN, OURS, ACCELERATE)}
    contenders = {OURS: through_zero_plugin(accelerator, models[OURS], data, clip)}
    assert accelerator.resolved is not None
    for name in (BARE, AGAIN):
        loader = MovedByHand(data, device)
        if zero:
            contenders[name] = bare_engine(accelerator.resolved.deepspeed_config(), models[name], loader)
        else:
            contenders[name] = bare_torch(models[name], loader, device, clip)
    if installed("accelerate") and not (zero and cpu):
        section = accelerator.resolved.deepspeed_config() if zero else None
        if section is not None:
            section.pop("managed_gradient_accumulation")  # Accelerate tells the engine the boundaries
        contenders[ACCELERATE] = through_accelerate(cpu, section, models[ACCELERATE], data, clip)
    return {name: contenders[name] for name in (BARE, OURS, AGAIN, ACCELERATE) if name in contenders}, device


def run_block(contender: Contender, batches: Batches, device: torch.device) -> None:
    """Train on the batches, and wait for the device."""
    contender.train(batches)
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def measure(rank: int, world: int, path: str, folder: str, options: argparse.Namespace) -> None:
    """Run in every process; the first writes the timings of each width and loop."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # read by Accelerate and DeepSpeed, not used
    if options.cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ["OMP_NUM_THREADS"] = "1"  # where it is open, Accelerate takes all cores, for every contender
        torch.set_num_threads(1)
    backend = "gloo" if options.cpu else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
    results: dict[tuple[str, str], Timings] = {}
    for size in options.sizes:
        for clip in (False, True):
            contenders, device = build_contenders(path, WIDTHS[size], clip, options.cpu, options.steps)
            batch = torch.randn(2, BATCH, WIDTHS[size], device=device)
            for loop in LOOPS:
                if (loop == "loader + clip") != clip:
                    continue
                blocks = {
                    name: partial(
                        run_block,
                        contender,
                        Repeated((batch[0], batch[1]), options.steps) if loop == "step" else contender.loader,
                        device,
                    )
                    for name, contender in contenders.items()
                }
                results[size, loop] = take_turns(blocks, options.pairs, warmup=2, clock=CLOCKS[options.clock])
    if rank == 0:
        torch.save({key: dict(timings) for key, timings in results.items()}, Path(folder, "timings.pt"))
    dist.barrier()
    os._exit(0)  # engines of both kinds hold the group; there is nothing left to end in order


class Repeated:
    """The same batch, `times` times, as often as it is iterated."""

    def __init__(self, batch: tuple[Tensor, Tensor], times: int) -> None:
        self._batch, self._times = batch, times

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return repeat(self._batch, self._times)


# ---- the table ------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30, help="rounds per loop (default 30)")
    parser.add_argument("--steps", type=int, default=20, help="steps of a block (default 20)")
    parser.add_argument("--paths", nargs="+", default=list(PATHS), choices=PATHS, help="default: all")
    parser.add_argument("--sizes", nargs="+", default=list(WIDTHS), choices=WIDTHS, help="default: all")
    parser.add_argument("--processes", type=int, default=2, help="of every path but `single` (default 2)")
    parser.add_argument("--clock", default="wall", choices=CLOCKS, help="default: wall")
    parser.add_argument("--cpu", action="store_true", default=not torch.cuda.is_available(), help="even with a GPU")
    options = parser.parse_args()
    console = Console(width=WIDTH)
    if not installed("accelerate"):
        console.print("accelerate is not installed: pip install accelerate")

    device = "CPU" if options.cpu else torch.cuda.get_device_name()
    caption = describe_run("zero-plugin", "torch", "deepspeed", "accelerate")
    table = Table(
        title=f"training step, {options.clock} time, {options.processes} processes on {device}; target: ratio <= 1.02",
        caption=f"{caption}; {options.pairs} rounds of {options.steps} steps",
        caption_justify="left",
        box=MARKDOWN,
    )
    table.add_column("path")
    table.add_column("model")
    table.add_column("loop")
    for column in ("by hand, ms", "zero_plugin", "extra, µs", "by hand again", "accelerate"):
        table.add_column(column, justify="right")
    for path in options.paths:
        world = 1 if path == "single" else options.processes
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(measure, (world, path, folder, options), nprocs=world)
            results = torch.load(Path(folder, "timings.pt"))
        for (size, loop), rows in results.items():
            timings = Timings(rows)
            table.add_row(
                path,
                size,
                loop,
                f"{timings.seconds(BARE) / options.steps * 1e3:.2f}",
                show_ratio(timings, OURS),
                f"{timings.extra(OURS, BARE) / options.steps * 1e6:+.0f}",
                show_ratio(timings, AGAIN),
                show_ratio(timings, ACCELERATE) if ACCELERATE in timings else "",
            )
    console.print(table)


def show_ratio(timings: Timings, name: str) -> str:
    return f"{timings.ratio(name, BARE):.3f} ± {timings.spread(name, BARE):.3f}"


if __name__ == "__main__":
    main()
