"""Trains, saves every other step, and resumes from an earlier run's checkpoints: STORE RANK WORLD BOARD ARGUMENTS.

BOARD is a file with a row of numbers for each process: its phase (index into PHASES), how often it entered each phase,
and, from SAVED on, its steps. The process pauses in each phase, so a test can kill it there. ARGUMENTS is JSON.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from device import process_group
from paths import ZERO, loss_of, own_batch
from torch import nn

from zero_plugin import Accelerator
from zero_plugin.checkpoint import publish
from zero_plugin.config.handlers import ProjectConfiguration
from zero_plugin.distributed import collectives
from zero_plugin.errors import CheckpointError

PHASES = ("none", "write", "fsync", "rename", "rotate")
SAVED, REACHED = 8, 9  # steps at the last finished save; steps taken


def run(
    board: Any,
    *,
    folder: str,
    path: str,
    naming: str,
    steps: int,
    saves: bool = True,
    must_load: bool = False,
    swaps: bool = True,
    dwell: float = 0.0,
    seed: int = 0,
    asynchronous: bool = False,
) -> None:
    """Train.

    Args:
        board: see the module docstring.
        folder: holds the checkpoints and `losses.txt`.
        path: see `paths`.
        naming: how checkpoints are named: `automatic`, `numbered`, or `fixed` (always the same folder).
        steps: number of steps after which the training ends.
        saves: whether the run saves.
        must_load: whether a complete checkpoint must exist.
        swaps: whether the file system can swap two names.
        dwell: longest pause at one point of a phase, in seconds.
        seed: seed of the pauses.
        asynchronous: whether the run saves asynchronously.
    """
    row = board[dist.get_rank()]
    if dwell:
        announce_phases(row, dwell, random.Random(1000 * seed + dist.get_rank()))
    if not swaps:
        publish.exchange = lambda one, other: False
    place = Path(folder, {"automatic": "checkpoints", "numbered": "numbered", "fixed": "last"}[naming])
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=naming == "automatic", total_limit=2)
    kind = "DEEPSPEED" if path in ZERO else "MULTI_CPU" if path == "ddp" else "NO"
    section = {"zero_optimization": ZERO[path]} if path in ZERO else {}
    config = {"distributed_type": kind, "use_cpu": True, "scheduler_counts": "steps", "deepspeed_config": section}
    accelerator = Accelerator(config=config, project_config=project)
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 4))
    adamw = torch.optim.AdamW(net.parameters(), lr=1e-2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adamw, steps)
    model, optimizer, schedule = accelerator.prepare(net, adamw, cosine)
    torch.manual_seed(7 + dist.get_rank())
    first = unfinished = 0
    try:
        first = accelerator.load_state(place, verify=True).steps
    except CheckpointError:
        if must_load:
            raise
    for step in range(first, steps):
        loss = loss_of(model, own_batch(step))
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        row[REACHED] = step + 1
        value = float(collectives.reduce(loss.detach()))
        if accelerator.is_main_process:
            with Path(folder, "losses.txt").open("a") as losses:
                losses.write(f"{step} {value!r}\n")
        if saves and step % 2 == 1:
            target = place / f"checkpoint_{step + 1}" if naming == "numbered" else place
            limit = {"total_limit": 2} if naming == "numbered" else {}
            options = {"max_shard_size": 600, "asynchronous": asynchronous, **limit}
            accelerator.save_state(None if naming == "automatic" else target, **options)
            row[SAVED] = unfinished if asynchronous else step + 1
            unfinished = step + 1
    accelerator.end_training()
    row[SAVED] = unfinished


def announce_phases(row: Any, dwell: float, draw: random.Random) -> None:
    """Wrap the system calls of a save. The board shows the phase before, during and after, with pauses."""

    def stay() -> None:
        time.sleep(draw.uniform(0, dwell))

    @contextmanager
    def inside(phase: str) -> Iterator[None]:
        before, index = int(row[0]), PHASES.index(phase)
        row[index] += 1
        row[0] = index
        stay()
        yield
        stay()
        row[0] = before

    def wrap(owner: Any, name: str, phase_of: Callable[..., str | None]) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            phase = phase_of(*args, **kwargs)
            if phase is None:
                return original(*args, **kwargs)
            with inside(phase):
                return original(*args, **kwargs)

        setattr(owner, name, wrapped)

    class InParts:
        """A file that is written in two parts, each flushed immediately."""

        def __init__(self, file: Any) -> None:
            self._file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def __enter__(self) -> InParts:
            return self

        def __exit__(self, *error: object) -> None:
            self._file.close()

        def write(self, data: Any) -> int:
            with inside("write"):
                for part in (data[: len(data) // 2], data[len(data) // 2 :]):
                    self._file.write(part)
                    self._file.flush()
                    stay()
            return len(data)

    pwrite, path_open = os.pwrite, Path.open

    def pwrite_half(descriptor: int, data: Any, offset: int) -> int:
        with inside("write"):
            return pwrite(descriptor, data[: (len(data) + 1) // 2], offset)

    def open_in_parts(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        file = path_open(self, mode, *args, **kwargs)
        return InParts(file) if "w" in mode else file

    def phase_of_rename(source: Path, target: Any) -> str:
        if Path(target).name.endswith(".removing"):
            return "rotate"
        publishes = source.name.endswith((".writing", ".replaced")) or Path(target).name.endswith(".replaced")
        return "rename" if publishes else "write"

    os.pwrite, Path.open = pwrite_half, open_in_parts  # type: ignore[method-assign]
    wrap(os, "fsync", lambda *_: "fsync")
    wrap(Path, "rename", phase_of_rename)
    wrap(Path, "replace", phase_of_rename)
    wrap(publish, "exchange", lambda *_: "rename")
    wrap(os, "unlink", lambda *_, dir_fd=None: None if dir_fd is None else "rotate")  # as rmtree calls it
    wrap(os, "rmdir", lambda *_, dir_fd=None: None if dir_fd is None else "rotate")


def main() -> None:
    """Train in a process group."""
    store, rank, world, board, arguments = sys.argv[1:]
    with process_group(store, rank, world):
        run(np.memmap(board, np.int64, "r+").reshape(int(world), -1), **json.loads(arguments))


if __name__ == "__main__":
    main()
