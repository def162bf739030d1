"""Measure the checked collectives against torch's own on the same tensors.

Two processes over gloo call each in turns: torch by hand, torch by hand again (the control), zero_plugin and, if
installed, Accelerate. Each turn is a block of calls; every other round is in reverse order. A ratio is the median over
the rounds of a contender's time over torch's in the same round; ± is half the distance between the quartiles.

    python benchmarks/collectives.py --rounds 20
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pairs import WIDTH, Timings, describe_run, installed, take_turns
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from torch import Tensor

BARE, AGAIN, OURS, ACCELERATE = "torch", "torch again", "zero_plugin", "accelerate"
SIZES = {"8 B": 8, "256 B": 256, "4 KiB": 4096, "64 KiB": 2**16, "1 MiB": 2**20, "16 MiB": 2**24}
OPERATIONS = ("gather", "reduce", "broadcast")
CALLS_S = 0.05  # approximate duration of a block of calls


def by_hand(operation: str, tensor: Tensor) -> Callable[[], object]:
    """Return the call that a script without a library makes."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]

    def gather() -> Tensor:
        dist.all_gather(parts, tensor)
        return torch.cat(parts)

    def reduce() -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    def broadcast() -> Tensor:
        copied = tensor.clone()
        dist.broadcast(copied, 0)
        return copied

    return {"gather": gather, "reduce": reduce, "broadcast": broadcast}[operation]


def contenders(operation: str, tensor: Tensor) -> dict[str, Callable[[], object]]:
    """Return each contender's call of the operation."""
    from zero_plugin.utils import operations as ours

    call: dict[str, Callable[[Any], object]] = {
        "gather": ours.gather,
        "reduce": partial(ours.reduce, reduction="sum"),
        "broadcast": ours.broadcast,
    }
    found = {BARE: by_hand(operation, tensor), AGAIN: by_hand(operation, tensor)}
    found[OURS] = partial(call[operation], tensor)
    if installed("accelerate"):
        from accelerate.utils import operations as theirs

        other = {"reduce": partial(theirs.reduce, reduction="sum"), "broadcast": theirs.broadcast}
        found[ACCELERATE] = partial(other.get(operation, theirs.gather), tensor)
    return found


def measure(operation: str, size: int, rounds: int) -> Timings:
    """Time blocks of calls, with the same number of calls on all processes."""
    tensor = torch.arange(size // 4, dtype=torch.float32)
    raced = contenders(operation, tensor)
    once = take_turns({BARE: raced[BARE]}, 5).seconds(BARE)
    calls = torch.tensor(max(1, int(CALLS_S / once)))
    dist.all_reduce(calls, dist.ReduceOp.MAX)

    def block(call: Callable[[], object]) -> None:
        for _ in range(int(calls)):
            call()

    timings = take_turns({name: partial(block, call) for name, call in raced.items()}, rounds)
    return Timings({name: [seconds / int(calls) for seconds in found] for name, found in timings.items()})


def run(rank: int, store: str, processes: int, rounds: int) -> None:
    """Run one of the processes; the first process prints."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes), OMP_NUM_THREADS="1")
    os.environ.update(LOCAL_WORLD_SIZE=str(processes), MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # for Accelerate
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    from zero_plugin import Accelerator

    accelerator = Accelerator(cpu=True)
    if installed("accelerate"):
        import accelerate

        accelerate.PartialState(cpu=True)
    table = Table(box=MARKDOWN)
    for column in ("operation", "payload", "torch, µs", AGAIN, OURS, "µs more", ACCELERATE):
        table.add_column(column, justify="left" if column == "operation" else "right")
    for operation in OPERATIONS:
        for name, size in SIZES.items():
            timings = measure(operation, size, rounds)
            ratios = [
                f"{timings.ratio(other, BARE):.2f} ± {timings.spread(other, BARE):.2f}" if other in timings else ""
                for other in (AGAIN, OURS, ACCELERATE)
            ]
            extra = f"{timings.extra(OURS, BARE) * 1e6:.0f}"
            table.add_row(operation, name, f"{timings.seconds(BARE) * 1e6:.0f}", *ratios[:2], extra, ratios[2])
    if rank == 0:
        console = Console(width=WIDTH)
        console.print(table)
        console.print(describe_run("torch", "accelerate"))
    accelerator.end_training()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start the processes and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (str(Path(folder) / "store"), options.processes, options.rounds)
        torch.multiprocessing.spawn(run, arguments, options.processes)


if __name__ == "__main__":
    main()
