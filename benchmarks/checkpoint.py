"""Measure `save_state` and `load_state` against DeepSpeed's own checkpoints.

Two processes (gloo, CPU) train a stack of linear layers for one step with AdamW. In every round, zero_plugin and a bare
engine of the same configuration take turns to save, and a new engine loads the result. Both are timed until the disk
has the bytes. `save_state` waits for the disk; DeepSpeed's `save_checkpoint` does not, so the processes then call fsync
on its files. The time without fsync is listed too. Loading finds the files in the page cache.

`load_state` is also timed with and without the verification of what it reads, in turns, `--verifications` times a
round; the target is a ratio of at most 1.1. Each result is printed immediately, and after SIGTERM the table has the
completed rounds.

The table also compares each contender with the disk. In the same round, one process writes as many bytes to the same
disk one after another and calls fsync, as `dd conv=fsync` does, and then reads them again.

    python benchmarks/checkpoint.py --gigabytes 1 --rounds 3 --folder /data

A run needs about 13 times the parameters' bytes in memory, and 9 times on disk, which it frees.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from pairs import LATE, WIDTH, Timings, describe_run, keep, measure_cases
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from torch import nn

from zero_plugin import Accelerator, DummyOptim

CASES = {"stage 2, fp32": (2, "no"), "stage 3, fp32": (3, "no"), "stage 3, bf16": (3, "bf16")}
OURS, THEIRS = "zero_plugin", "DeepSpeed"
LAYER = 2048  # features: 16 MiB of fp32 weights
BLOCK = 2**24  # bytes of a sequential write or read


def make_model(gigabytes: float) -> nn.Module:
    return nn.Sequential(*(nn.Linear(LAYER, LAYER, bias=False) for _ in range(round(gigabytes * 2**30 / LAYER**2 / 4))))


class Round:
    """One contender that saves and loads once."""

    def __init__(self, contender: str, case: str, options: argparse.Namespace) -> None:
        stage, precision = CASES[case]
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "optimizer": optimizer}
        document = {"distributed_type": "DEEPSPEED", "use_cpu": options.cpu, "deepspeed_config": config}
        self._accelerator = Accelerator(config=document, mixed_precision=precision)
        model = make_model(options.gigabytes)
        if contender == OURS:
            self._model, self._optimizer = self._accelerator.prepare(model, DummyOptim(model.parameters(), lr=1e-3))
        else:
            small = nn.Linear(1, 1)
            self._accelerator.prepare(small, DummyOptim(small.parameters(), lr=1e-3))  # resolves the configuration
            assert self._accelerator.resolved is not None
            self._model = bare_engine(self._accelerator.resolved.deepspeed_config(), model)
        self._is_ours = contender == OURS

    def train(self) -> None:
        """Take one step, which creates the optimizer's states."""
        weight = next(self._model.parameters())
        loss = self._model(torch.ones(1, LAYER, dtype=weight.dtype, device=weight.device)).float().square().mean()
        if self._is_ours:
            self._accelerator.backward(loss)
            self._optimizer.step()
            self._optimizer.zero_grad()
        else:
            self._model.backward(loss)
            self._model.step()

    def save(self, folder: Path) -> float:
        """Return the seconds of saving, without the fsync of files that are not on the disk yet."""
        call = self._accelerator.save_state if self._is_ours else self._model.save_checkpoint
        return seconds_of(lambda: call(str(folder)))

    def load(self, folder: Path, **options: bool) -> float:
        """Return the seconds of loading."""
        call = self._accelerator.load_state if self._is_ours else self._model.load_checkpoint
        return seconds_of(lambda: call(str(folder), **options))

    def end(self) -> None:
        """Free the memory."""
        if not self._is_ours:
            from zero_plugin.strategies.deepspeed.session import forget_module

            self._model.destroy()
            forget_module(self._model.module)  # otherwise DeepSpeed keeps it, and each round adds memory
        self._accelerator.end_training()


def bare_engine(config: dict[str, Any], model: nn.Module) -> Any:
    import deepspeed

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def seconds_of(call: Callable[[], object]) -> float:
    """Return the seconds until every process has returned from the call."""
    dist.barrier()
    wait_for_device()
    start = time.perf_counter()
    call()
    wait_for_device()
    dist.barrier()
    return time.perf_counter() - start


def wait_for_device() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def sync_files(folder: Path) -> None:
    """Wait until the files are on the disk; each process takes a part of them."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    for file in files[dist.get_rank() :: dist.get_world_size()]:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def write_sequentially(file: Path, size: int) -> None:
    block = memoryview(os.urandom(BLOCK))
    with file.open("wb", buffering=0) as opened:
        for begin in range(0, size, BLOCK):
            opened.write(block[: min(BLOCK, size - begin)])
        os.fsync(opened.fileno())


def read_sequentially(file: Path) -> None:
    block = bytearray(BLOCK)
    with file.open("rb", buffering=0) as opened:
        while opened.readinto(block):
            pass


def run_round(contender: str, case: str, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Return the seconds and bytes of one contender."""
    saving = Round(contender, case, options)
    saving.train()
    saved = folder / contender
    measured = {"save": saving.save(saved)}
    measured["fsync"] = 0.0 if contender == OURS else seconds_of(lambda: sync_files(saved))
    saving.end()
    del saving
    gc.collect()
    loading = Round(contender, case, options)
    measured["load"] = loading.load(saved)
    if contender == OURS:
        pairs = [(loading.load(saved), loading.load(saved, verify=False)) for _ in range(options.verifications)]
        measured["verification"] = median(verified / plain for verified, plain in pairs)
    loading.end()
    measured["bytes"] = bytes_in(saved)
    dist.barrier()
    if dist.get_rank() == 0:
        raw = folder / "raw"
        shutil.rmtree(saved)
        start = time.perf_counter()
        write_sequentially(raw, int(measured["bytes"]))
        measured["raw write"] = time.perf_counter() - start
        start = time.perf_counter()
        read_sequentially(raw)
        measured["raw read"] = time.perf_counter() - start
        raw.unlink()
    dist.barrier()
    return measured


def measure(rank: int, world: int, case: str, file: Path, options: argparse.Namespace) -> None:
    """Run all rounds in every process; the first process keeps the completed rounds."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ["DS_ACCELERATOR"] = "cpu" if options.cpu else "cuda"
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # read by DeepSpeed, not used
    torch.set_num_threads(1)
    backend = "gloo" if options.cpu else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{file.parent}/store", rank=rank, world_size=world)
    rounds: list[dict[str, dict[str, float]]] = []
    for index in range(options.rounds):
        rounds.append({})
        for name in (OURS, THEIRS) if index % 2 == 0 else (THEIRS, OURS):
            found = rounds[-1][name] = run_round(name, case, file.parent, options)
            if rank == 0:
                figures = ", ".join(f"{what} {figure:.3g}" for what, figure in found.items())
                print(f"{case}, round {index + 1}, {name}: {figures}", file=sys.stderr, flush=True)
        if rank == 0:
            keep(file, rounds)
    dist.barrier()
    os._exit(0)  # engines of both kinds hold the group; nothing remains that needs an orderly end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of the parameters in fp32 (default 1)")
    parser.add_argument("--rounds", type=int, default=3, help="of each case (default 3)")
    parser.add_argument("--verifications", type=int, default=5, help="loads of each round with and without (default 5)")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, help="default: all")
    parser.add_argument("--processes", type=int, default=2, help="default 2")
    parser.add_argument("--folder", default=".", help="on the disk to measure (default: here)")
    parser.add_argument("--cpu", action="store_true", default=not torch.cuda.is_available(), help="even with a GPU")
    options = parser.parse_args()

    table = Table(
        title=f"seconds to save and to load {options.gigabytes:g} GB of parameters with AdamW's states, "
        f"{options.processes} processes; target: ratio <= 1",
        caption=f"{describe_run('zero-plugin', 'torch', 'deepspeed')}; medians of {options.rounds} rounds",
        caption_justify="left",
        box=MARKDOWN,
    )
    for column in (
        "case",
        "",
        "zero_plugin",
        "DeepSpeed",
        "without fsync",
        "ratio",
        "of the disk: zero_plugin",
        "DeepSpeed",
    ):
        table.add_column(column, justify="left" if column in ("case", "") else "right")
    for case, rounds in zip(options.cases, measure_cases(measure, options.cases, options), strict=True):
        add_rows(table, case, rounds or [], options)
    Console(width=WIDTH).print(table)


def add_rows(table: Table, case: str, rounds: list[dict[str, dict[str, float]]], options: argparse.Namespace) -> None:
    """Add one row for saving and one for loading, from the completed rounds."""
    if not rounds:
        table.add_row(case, LATE)
        return
    title = case if len(rounds) == options.rounds else f"{case}, {len(rounds)} of {options.rounds} rounds"
    verification = median(one[OURS]["verification"] for one in rounds)
    print(f"{case}: load_state with verification / without: {verification:.2f}")
    for what, raw in (("save", "raw write"), ("load", "raw read")):
        timings = Timings(
            {
                name: [one[name][what] + (one[name]["fsync"] if what == "save" else 0.0) for one in rounds]
                for name in (OURS, THEIRS)
            }
        )
        shares = {
            name: median(one[name][raw] / t for one, t in zip(rounds, timings[name], strict=True)) for name in timings
        }
        bare = median(one[THEIRS]["save"] for one in rounds)
        table.add_row(
            title,
            what,
            f"{timings.seconds(OURS):.2f}",
            f"{timings.seconds(THEIRS):.2f}",
            f"{bare:.2f}" if what == "save" else "",
            f"{timings.ratio(OURS, THEIRS):.2f}",
            f"{shares[OURS]:.0%}",
            f"{shares[THEIRS]:.0%}",
        )


if __name__ == "__main__":
    main()
