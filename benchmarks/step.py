"""Measure what a training step costs through zero_plugin, against the same loop by hand on the bare engine.

For each path, processes (gloo on CPUs, NCCL on GPUs) build every contender around the same model, optimizer and
configuration: the loop by hand, a second copy of it, zero_plugin and, if it is installed and runs, Accelerate.

They then train in turns, a block of steps each, in reverse order every other round. A ratio is the median over the
rounds of a contender's time over the time of the loop by hand in the same round; ± is half the distance between the
quartiles. The second copy of the loop by hand shows the measurement's noise.

`--clock cpu` takes the processor time of the first process instead of the wall clock. It includes neither other
programs nor waiting for other processes.

Three loops are timed: the step alone, on one batch that stays on the device; the same fed by a DataLoader (sharded,
batches moved to the device); and the latter with the gradient norm clipped at 1. A step is a micro-batch.

    python benchmarks/step.py --pairs 30 --steps 20 --paths zero2 ddp

`--table` also times rows with other settings, in processor time: sizes up to 100 million parameters, accumulation,
bf16, loaders with workers. Every two settings occur together in some row; rows with accumulation 256 on the tiny model
are added.

    python benchmarks/step.py --table

The loop by hand on ZeRO is `engine.backward(loss); engine.step()` on `deepspeed.initialize`. It has the resolved
configuration that zero_plugin gives its own engine, in which clipping is one key. zero_plugin's loop calls
`clip_grad_norm_(model.parameters(), 1.0)` and gets the norm. On DDP and one device the loop by hand is plain torch.
Accelerate runs DeepSpeed on CPUs if `InitProcessGroupKwargs(backend="gloo")` sets its group to gloo. Accelerate is left
out of rows in which it fails.
"""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, product, repeat
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
PATHS: dict[str, dict[str, Any]] = {  # the ZeRO section; empty for plain torch
    "single": {},
    "ddp": {},
    "zero0": {"stage": 0},
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero2_offload": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "zero3": {"stage": 3},
    "zero3_offload": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}
LAYERS, BATCH, LR = 5, 8, 1e-3
WIDTHS = {"tiny": 64, "5M": 1024, "25M": 2240, "100M": 4480}  # 21 thousand, 5.2, 25 and 100 million parameters
LOOPS = ("step", "loader", "loader + clip")
WORKERS = 2  # processes of a loader with workers
# For `--table`: micro-batches of a block, and rounds.
BLOCKS = {"tiny": (40, 25), "5M": (8, 11), "25M": (4, 7), "100M": (4, 5)}
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}

Batches = Iterable[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Case:
    """One row: what is trained, and how.

    Attributes:
        path: a name of `PATHS`.
        size: a name of `WIDTHS`.
        loop: one of `LOOPS`, or `workers`, a loader with worker processes.
        accumulation: micro-batches of an optimizer step.
        precision: of the computation.
        clips: whether the gradient norm is clipped.
        steps, rounds: micro-batches of a block, and rounds of blocks.
    """

    path: str
    size: str
    loop: str
    accumulation: int = 1
    precision: str = "no"
    clips: bool = False
    steps: int = 20
    rounds: int = 30


def pairwise(factors: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Return rows in which every two values of different factors occur together.

    The choice is greedy: the next row is the one with the most new pairs.
    """
    rows = [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]

    def pairs(row: dict[str, Any]) -> set[Any]:
        return set(combinations(row.items(), 2))

    missing, chosen = set().union(*map(pairs, rows)), []
    while missing:
        best = max(rows, key=lambda row: len(pairs(row) & missing))
        missing -= pairs(best)
        chosen.append(best)
    return chosen


def rows_of_table() -> list[Case]:
    """Return the rows of `--table`."""
    factors: dict[str, tuple[Any, ...]] = {
        "path": ("single", "ddp", "zero0", "zero1", "zero2", "zero3", "zero3_offload"),
        "size": tuple(WIDTHS),
        "loop": ("step", "loader", "workers"),
        "accumulation": (1, 4),
        "precision": ("no", "bf16"),
        "clips": (False, True),
    }
    rows = [Case(**row) for row in pairwise(factors)]
    rows += [Case(path, "tiny", "step", accumulation=256) for path in ("single", "ddp", "zero2")]
    sized = [replace(row, steps=BLOCKS[row.size][0], rounds=BLOCKS[row.size][1]) for row in rows]
    order = list(PATHS)
    return sorted(
        (replace(row, steps=256) if row.accumulation == 256 else row for row in sized),
        key=lambda row: (order.index(row.path), list(WIDTHS).index(row.size)),
    )


@dataclass(frozen=True)
class Contender:
    """One way to train: the loop over some batches, and the loader that feeds it."""

    train: Callable[[Batches], None]
    loader: Batches


def make_model(width: int) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(LAYERS)]
    return nn.Sequential(*layers)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x).float(), y)


# ---- the contenders -------------------------------------------------------------------------------------------------


def through(
    accelerator: Any,
    optimizer: Any,
    model: nn.Module,
    data: TensorDataset,
    case: Case,
    dtype: torch.dtype | None = None,
) -> Contender:
    """Build a contender with the loop of zero_plugin's and Accelerate's users.

    The loops are the same, except for inputs that have to be cast.
    """
    loader: Any = DataLoader(data, batch_size=BATCH, **loader_settings(case))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def train(batches: Batches) -> None:
        for x, y in batches:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, x if dtype is None else x.to(dtype), y))
                if case.clips and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    return Contender(train, loader)


def loader_settings(case: Case) -> dict[str, Any]:
    return {"num_workers": WORKERS, "persistent_workers": True} if case.loop == "workers" else {}


def bare_engine(config: dict[str, Any], model: nn.Module, loader: Batches, case: Case) -> Contender:
    import deepspeed

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32

    def train(batches: Batches) -> None:
        for index, (x, y) in enumerate(batches):
            loss = nn.functional.mse_loss(engine(x.to(dtype)).float(), y)
            engine.backward(loss / case.accumulation if case.accumulation > 1 else loss)
            if (index + 1) % case.accumulation == 0:
                engine.step()

    return Contender(train, loader)


def bare_torch(model: nn.Module, loader: Batches, device: torch.device, case: Case) -> Contender:
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)  # zero_plugin builds the same from its section
    wrapped = DistributedDataParallel(model) if dist.get_world_size() > 1 else model
    every = case.accumulation

    def backward(x: Tensor, y: Tensor) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=case.precision == "bf16"):
            output = wrapped(x)
        loss = nn.functional.mse_loss(output.float(), y)
        (loss / every if every > 1 else loss).backward()

    def train(batches: Batches) -> None:
        for index, (x, y) in enumerate(batches):
            if (index + 1) % every and isinstance(wrapped, DistributedDataParallel):
                with wrapped.no_sync():
                    backward(x, y)
                continue
            backward(x, y)
            if (index + 1) % every == 0:
                if case.clips:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    return Contender(train, loader)


def accelerates_own(case: Case, cpu: bool, zero: dict[str, Any] | None) -> Any:
    """Return Accelerate's Accelerator, after removing the state that an earlier one has left in this process."""
    from accelerate import Accelerator as AcceleratesOwn
    from accelerate import DeepSpeedPlugin, InitProcessGroupKwargs
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    settings: dict[str, Any] = {"mixed_precision": case.precision, "gradient_accumulation_steps": case.accumulation}
    if zero:
        settings["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=copy.deepcopy(zero))
        settings["kwargs_handlers"] = [InitProcessGroupKwargs(backend="gloo")] if cpu else []
    else:
        settings["cpu"] = cpu
    return AcceleratesOwn(**settings)


class MovedByHand:
    """Loader of this process's part of the data, on the device."""

    def __init__(self, data: TensorDataset, device: torch.device, case: Case) -> None:
        sampler: Any = DistributedSampler(data, shuffle=False)
        self._loader = DataLoader(data, batch_size=BATCH, sampler=sampler, **loader_settings(case))
        self._device = device

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in self._loader:
            yield x.to(self._device), y.to(self._device)


# ---- one process ----------------------------------------------------------------------------------------------------


def make_config(case: Case, cpu: bool) -> dict[str, Any]:
    zero = PATHS[case.path]
    deepspeed: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": case.accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
    }
    if case.clips:
        deepspeed["gradient_clipping"] = 1.0
    if zero:
        deepspeed["zero_optimization"] = zero
    kind = "DEEPSPEED" if zero else "NO" if dist.get_world_size() == 1 else "MULTI_CPU" if cpu else "MULTI_GPU"
    settings = {"distributed_type": kind, "use_cpu": cpu, "scheduler_counts": "steps"}
    return {**settings, "mixed_precision": case.precision, "deepspeed_config": deepspeed}


def build_contenders(case: Case, cpu: bool) -> tuple[dict[str, Contender], torch.device]:
    zero, width = PATHS[case.path], WIDTHS[case.size]
    accelerator = Accelerator(config=make_config(case, cpu))
    model, device = make_model(width), accelerator.device
    samples = torch.randn(case.steps * BATCH * dist.get_world_size(), width)
    data = TensorDataset(samples, samples.roll(1))
    models = {name: copy.deepcopy(model) for name in (BARE, AGAIN, OURS, ACCELERATE)}
    ours = DummyOptim(models[OURS].parameters(), lr=LR)
    contenders = {OURS: through(accelerator, ours, models[OURS], data, case)}
    assert accelerator.resolved is not None
    config = accelerator.resolved.deepspeed_config() if zero else None
    for name in (BARE, AGAIN):
        loader = MovedByHand(data, device, case)
        if config is not None:
            contenders[name] = bare_engine(config, models[name], loader, case)
        else:
            contenders[name] = bare_torch(models[name], loader, device, case)
    if installed("accelerate"):
        try:
            theirs = through_accelerate(config, models[ACCELERATE], data, case, cpu)
            theirs.train(Repeated(tuple(torch.randn(2, BATCH, width, device=device)), case.accumulation))  # type: ignore[arg-type]
        except (RuntimeError, ValueError, AttributeError) as error:  # on every process
            print(f"{case.path}, {case.precision}: Accelerate does not run: {error}", flush=True)
        else:
            contenders[ACCELERATE] = theirs
    return {name: contenders[name] for name in (BARE, OURS, AGAIN, ACCELERATE) if name in contenders}, device


def through_accelerate(
    config: dict[str, Any] | None, model: nn.Module, data: TensorDataset, case: Case, cpu: bool
) -> Contender:
    from accelerate.utils import DummyOptim as AcceleratesDummy

    section = None
    if config is not None:
        section = copy.deepcopy(config)
        section.pop("managed_gradient_accumulation")  # Accelerate tells the engine where windows end
        section["gradient_accumulation_steps"] = case.accumulation
        section["train_batch_size"] = BATCH * case.accumulation * dist.get_world_size()
    accelerator = accelerates_own(case, cpu, section)
    make: Any = AcceleratesDummy if section else torch.optim.AdamW
    dtype = torch.bfloat16 if section and case.precision == "bf16" else None
    return through(accelerator, make(model.parameters(), lr=LR), model, data, case, dtype)


def run_block(contender: Contender, batches: Batches, device: torch.device) -> None:
    """Train on the batches and wait for the device."""
    contender.train(batches)
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def measure(rank: int, world: int, cases: list[Case], folder: str, options: argparse.Namespace) -> None:
    """Run in every process; the first process writes the timings of each case."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # read by Accelerate and DeepSpeed, not used
    if options.cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ["OMP_NUM_THREADS"] = "1"  # if unset, Accelerate takes all cores, for every contender
        torch.set_num_threads(1)
    backend = "gloo" if options.cpu else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
    results = [dict(measure_case(case, options)) for case in cases]
    if rank == 0:
        torch.save(results, Path(folder, "timings.pt"))
    dist.barrier()
    os._exit(0)  # engines of both kinds hold the group; nothing remains that needs an orderly end


def measure_case(case: Case, options: argparse.Namespace) -> Timings:
    contenders, device = build_contenders(case, options.cpu)
    x, y = torch.randn(2, BATCH, WIDTHS[case.size], device=device)
    blocks = {
        name: partial(
            run_block, contender, Repeated((x, y), case.steps) if case.loop == "step" else contender.loader, device
        )
        for name, contender in contenders.items()
    }
    return take_turns(blocks, case.rounds, warmup=2, clock=CLOCKS[options.clock])


class Repeated:
    """The same batch, `times` times, for any number of iterations."""

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
    parser.add_argument("--sizes", nargs="+", default=list(WIDTHS)[:3], choices=WIDTHS, help="default: to 25M")
    parser.add_argument("--processes", type=int, default=2, help="of every path except `single` (default 2)")
    parser.add_argument("--clock", default="wall", choices=CLOCKS, help="default: wall")
    parser.add_argument("--cpu", action="store_true", default=not torch.cuda.is_available(), help="even with a GPU")
    parser.add_argument("--table", action="store_true", help="rows of all settings, processor time")
    options = parser.parse_args()
    console = Console(width=WIDTH)
    if not installed("accelerate"):
        console.print("accelerate is not installed: pip install accelerate")
    if options.table:
        options.clock = "cpu"
        groups = [[row] for row in rows_of_table() if row.path in options.paths]
    else:
        groups = [
            [
                Case(path, size, loop, clips=loop == LOOPS[2], steps=options.steps, rounds=options.pairs)
                for size in options.sizes
                for loop in LOOPS
            ]
            for path in options.paths
        ]
    device = "CPU" if options.cpu else torch.cuda.get_device_name()
    caption = describe_run("zero-plugin", "torch", "deepspeed", "accelerate")
    table = Table(
        title=f"training step, {options.clock} time, {options.processes} processes on {device}",
        caption=caption,
        caption_justify="left",
        box=MARKDOWN,
    )
    for column in ("path", "model", "loop", "accumulation", "precision", "clip"):
        table.add_column(column)
    for column in ("by hand, ms", "zero_plugin", "extra, µs", "by hand again", "accelerate"):
        table.add_column(column, justify="right")
    for cases in groups:
        add_rows(table, cases, options)
        if options.table:  # a row takes a minute, and a session may end
            print(" | ".join(str(cell) for cell in (list(column.cells)[-1] for column in table.columns)), flush=True)
    console.print(table)


def add_rows(table: Table, cases: list[Case], options: argparse.Namespace) -> None:
    """Measure the cases, which share one path, and add a row for each."""
    world = 1 if cases[0].path == "single" else options.processes
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure, (world, cases, folder, options), nprocs=world)
        results = torch.load(Path(folder, "timings.pt"))
    for case, found in zip(cases, results, strict=True):
        timings = Timings(found)
        table.add_row(
            case.path,
            case.size,
            case.loop,
            str(case.accumulation),
            case.precision,
            "yes" if case.clips else "",
            f"{timings.seconds(BARE) / case.steps * 1e3:.2f}",
            show_ratio(timings, OURS),
            f"{timings.extra(OURS, BARE) / case.steps * 1e6:+.0f}",
            show_ratio(timings, AGAIN),
            show_ratio(timings, ACCELERATE) if ACCELERATE in timings else "",
        )


def show_ratio(timings: Timings, name: str) -> str:
    return f"{timings.ratio(name, BARE):.3f} ± {timings.spread(name, BARE):.3f}"


if __name__ == "__main__":
    main()
