"""Measure what a step costs compared to plain torch if a model has very many tensors: frozen or trained ones.

One process on one device (with `--ddp`, two over gloo) takes steps in turns: by hand, by hand again (the control) and
through zero_plugin, with accumulation 4. The numbers are processor time of the first process.

    python benchmarks/many_tensors.py --rounds 15
"""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from pairs import WIDTH, describe_run, take_turns
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zero_plugin import Accelerator

BARE, AGAIN, OURS = "by hand", "by hand again", "zero_plugin"
ACCUMULATION = 4
WIDTH_OF_TENSORS = 8


class Wide(nn.Module):
    """A few tensors that compute, and as many others as requested, which enter the loss through one sum."""

    def __init__(self, trained: int, frozen: int) -> None:
        super().__init__()
        self.trained = nn.ParameterList([torch.randn(WIDTH_OF_TENSORS) for _ in range(trained)])
        self.frozen = nn.ParameterList([torch.randn(WIDTH_OF_TENSORS) for _ in range(frozen)]).requires_grad_(False)
        self._trained, self._frozen = tuple(self.trained), tuple(self.frozen)  # a ParameterList is slow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean square of all trained tensors times the input, plus the mean of the frozen ones."""
        loss = torch.stack(self._trained).mul(x).square().mean()
        return loss + torch.stack(self._frozen).mean() if self._frozen else loss


def by_hand(model: nn.Module, distributed: bool) -> Callable[[], None]:
    """Return a window of micro-batches as users of plain torch write it."""
    ddp = DistributedDataParallel(model) if distributed else model
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    x = torch.ones(WIDTH_OF_TENSORS)

    def window() -> None:
        for micro in range(ACCUMULATION):
            if distributed and micro < ACCUMULATION - 1:
                with ddp.no_sync():  # type: ignore[operator]
                    (ddp(x) / ACCUMULATION).backward()
            else:
                (ddp(x) / ACCUMULATION).backward()
        optimizer.step()
        optimizer.zero_grad()

    return window


def by_plugin(accelerator: Accelerator, given: nn.Module) -> Callable[[], None]:
    """Return the same window through `accumulate`."""
    adam = torch.optim.SGD([p for p in given.parameters() if p.requires_grad], lr=1e-4)
    model, optimizer = accelerator.prepare(given, adam)
    x = torch.ones(WIDTH_OF_TENSORS)

    def window() -> None:
        for _ in range(ACCUMULATION):
            with accelerator.accumulate(model):
                accelerator.backward(model(x))
                optimizer.step()
                optimizer.zero_grad()

    return window


def run(rank: int, store: str, processes: int, rounds: int, windows: int) -> None:
    """Run one of the processes; the first process prints."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    if processes > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    table = Table(box=MARKDOWN)
    for column in ("trained", "frozen", "window by hand, ms", AGAIN, OURS):
        table.add_column(column, justify="right")
    for trained, frozen in ((100, 0), (100, 10_000), (2_000, 0)):
        torch.manual_seed(0)
        model = Wide(trained, frozen)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
        contenders = {
            BARE: by_hand(copy.deepcopy(model), processes > 1),
            AGAIN: by_hand(copy.deepcopy(model), processes > 1),
            OURS: by_plugin(accelerator, copy.deepcopy(model)),
        }

        def block(window: Callable[[], None]) -> None:
            for _ in range(windows):
                window()

        timings = take_turns({n: partial(block, c) for n, c in contenders.items()}, rounds, clock=time.process_time)
        ratios = [f"{timings.ratio(n, BARE):.2f} ± {timings.spread(n, BARE):.2f}" for n in (AGAIN, OURS)]
        table.add_row(f"{trained:,}", f"{frozen:,}", f"{timings.seconds(BARE) / windows * 1e3:.2f}", *ratios)
        accelerator.free_memory()
    if rank == 0:
        console = Console(width=WIDTH)
        console.print(f"{'DDP on 2 processes' if processes > 1 else 'one device'}, accumulation {ACCUMULATION}")
        console.print(table)
        console.print(describe_run("torch"))
    accelerator.end_training()


def main() -> None:
    """Start the processes and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--windows", type=int, default=20, help="in a block")
    parser.add_argument("--ddp", action="store_true")
    options = parser.parse_args()
    if not options.ddp:
        run(0, "", 1, options.rounds, options.windows)
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments = (str(Path(folder) / "store"), 2, options.rounds, options.windows)
        torch.multiprocessing.spawn(run, arguments, 2)


if __name__ == "__main__":
    main()
