"""Measure saving a model's weights from ZeRO stage 3 as one file: `save_model` against `save_16bit_model`.

Two processes (gloo, CPU) hold one partitioned model. In every round, both contenders write it in turns into empty
folders. With `save_model`, each process writes its own ranges. DeepSpeed's `save_16bit_model` on the same engine (with
`stage3_gather_16bit_weights_on_model_save`) gathers the model in the first process, which pickles it. Both are timed
until the disk has the bytes. `save_model` waits for the disk; DeepSpeed's call does not, so the script then calls fsync
on the file. The time without fsync is listed too.

The table also compares with the disk. In the same round, one process writes as many bytes to the same disk one after
another and calls fsync, as `dd conv=fsync` does. Memory is the most that the call adds to any process's anonymous pages
(RssAnon).

    python benchmarks/save_weights.py --gigabytes 1 --rounds 5 --folder /data

A run needs about 8 times the file's bytes in memory, and twice on disk, which it frees.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from pairs import WIDTH, Timings, describe_run
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from torch import nn

from zero_plugin import Accelerator, DummyOptim

PRECISIONS = {"bf16": 2, "fp32": 4}  # bytes of a weight
OURS, THEIRS, SYNCED, DISK = "zero_plugin", "DeepSpeed", "DeepSpeed + fsync", "disk"
LAYER = 2048  # features
BLOCK = 2**24  # bytes of a sequential write


def make_model(size: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(LAYER, LAYER, bias=False) for _ in range(size // LAYER**2)))


class PeakMemory:
    """The largest growth of RssAnon inside the context, in bytes."""

    def __enter__(self) -> PeakMemory:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # otherwise memory that the last round freed would hide this round's
        self._before = self._highest = anonymous_bytes()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    @property
    def growth(self) -> int:
        return self._highest - self._before

    def _watch(self) -> None:
        while not self._ends.wait(0.002):
            self._highest = max(self._highest, anonymous_bytes())


def anonymous_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def sync_file(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def write_sequentially(file: Path, size: int) -> None:
    block = memoryview(os.urandom(BLOCK))
    with file.open("wb", buffering=0) as opened:
        for begin in range(0, size, BLOCK):
            opened.write(block[: min(BLOCK, size - begin)])
        os.fsync(opened.fileno())


def seconds_of(call: Callable[[], object]) -> float:
    """Return the seconds until every process has returned from the call."""
    dist.barrier()
    start = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - start


def run_round(folder: Path, contenders: dict[str, Callable[[Path], object]], order: list[str]) -> dict[str, float]:
    """Return the seconds and the growth in memory of each contender."""
    is_first = dist.get_rank() == 0
    measured: dict[str, float] = {}
    for name in order:
        place = folder / "saved"
        dist.barrier()
        if is_first:
            os.sync()  # writes of other programs and of the last round do not count
        with PeakMemory() as memory:
            measured[name] = seconds_of(lambda name=name, place=place: contenders[name](place))
        growth = torch.tensor(memory.growth)
        dist.all_reduce(growth, dist.ReduceOp.MAX)
        measured[f"{name} memory"] = float(growth)
        files = [file for file in place.iterdir() if file.suffix in (".safetensors", ".bin")]
        if name == THEIRS:
            measured[SYNCED] = measured[name] + seconds_of(lambda files=files: is_first and sync_file(files[0]))
        dist.barrier()
        if is_first:
            size = sum(file.stat().st_size for file in files)
            shutil.rmtree(place)
            if name == order[-1]:
                os.sync()
                start = time.perf_counter()
                write_sequentially(folder / "raw", size)
                measured[DISK] = time.perf_counter() - start
                measured["bytes"] = size
                (folder / "raw").unlink()
    return measured


def measure(rank: int, world: int, precision: str, folder: str, options: argparse.Namespace) -> None:
    """Run in every process; the first process writes the results."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), DS_ACCELERATOR="cpu")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # read by DeepSpeed, not used
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    document = {"distributed_type": "DEEPSPEED", "use_cpu": True, "deepspeed_config": config}
    accelerator = Accelerator(config=document, mixed_precision="bf16" if precision == "bf16" else "no")
    with accelerator.init_model():
        model: Any = make_model(int(options.gigabytes * 2**30) // PRECISIONS[precision])
    model, _ = accelerator.prepare(model, DummyOptim(model.parameters(), lr=1e-3))
    contenders: dict[str, Callable[[Path], object]] = {
        OURS: lambda place: accelerator.save_model(model, place),
        THEIRS: lambda place: model.save_16bit_model(str(place)),
    }
    orders = ([OURS, THEIRS], [THEIRS, OURS])
    rounds = [run_round(Path(folder), contenders, orders[index % 2]) for index in range(options.rounds + 1)]
    if rank == 0:
        torch.save(rounds[1:], Path(folder, "rounds.pt"))
    dist.barrier()
    os._exit(0)  # the engine holds the group; nothing remains that needs an orderly end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="GiB of the saved file (default 1)")
    parser.add_argument("--rounds", type=int, default=5, help="of each precision, after one that is not counted")
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS, help="default: both")
    parser.add_argument("--processes", type=int, default=2, help="default 2")
    parser.add_argument("--folder", default=".", help="on the disk to measure (default: here)")
    options = parser.parse_args()

    table = Table(
        title=f"seconds to save {options.gigabytes:g} GiB of weights from stage 3, {options.processes} processes; "
        "target: ratio <= 0.5",
        caption=f"{describe_run('zero-plugin', 'torch', 'deepspeed')}; medians of {options.rounds} rounds",
        caption_justify="left",
        box=MARKDOWN,
    )
    table.add_column("weights")
    for column in (
        OURS,
        SYNCED,
        "ratio",
        "without fsync",
        "ratio ",
        "disk alone",
        "share of it",
        "MiB more",
        "DeepSpeed",
    ):
        table.add_column(column, justify="right")
    for precision in options.precisions:
        with tempfile.TemporaryDirectory(dir=Path(options.folder).resolve()) as folder:
            spawned = (options.processes, precision, folder, options)
            torch.multiprocessing.spawn(measure, spawned, nprocs=options.processes)
            rounds = torch.load(Path(folder, "rounds.pt"))
        timings = Timings({name: [one[name] for one in rounds] for name in (OURS, THEIRS, SYNCED, DISK)})
        table.add_row(
            precision,
            f"{timings.seconds(OURS):.2f}",
            f"{timings.seconds(SYNCED):.2f}",
            f"{timings.ratio(OURS, SYNCED):.2f} ± {timings.spread(OURS, SYNCED):.2f}",
            f"{timings.seconds(THEIRS):.2f}",
            f"{timings.ratio(OURS, THEIRS):.2f} ± {timings.spread(OURS, THEIRS):.2f}",
            f"{timings.seconds(DISK):.2f}",
            f"{timings.ratio(DISK, OURS):.0%}",
            *(f"{median(one[f'{name} memory'] for one in rounds) / 2**20:.0f}" for name in (OURS, THEIRS)),
        )
    Console(width=WIDTH).print(table)


if __name__ == "__main__":
    main()
