"""Measure how long `save_state` keeps the training loop waiting: asynchronous against ordinary saves.

Two processes (gloo, CPU) train a stack of linear layers with AdamW under ZeRO. In every round they take some steps,
save in both ways, in turns, and take steps while the asynchronous save is being written. Before each save, everything
is on the disk.

The pause is the call's duration on the first process, plus the wait of the next step for the copy of the states. The
copy is made during that step's forward and backward. A ratio is the median over the rounds of the asynchronous save's
pause over the other's in the same round. The first asynchronous save uses memory that is new to the process, so it is
listed separately.

A step counts as one during a save if it begins before the save is complete. Pauses are printed immediately, and after
SIGTERM the table has the completed rounds.

    python benchmarks/save_async.py --gigabytes 1 --rounds 5 --folder /data

A run needs about 13 times the parameters' bytes in memory, and 4 times on disk, which it frees.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
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

from zero_plugin import Accelerator

LAYER = 2048  # features: 16 MiB of fp32 weights
ORDINARY, ASYNCHRONOUS = "ordinary", "asynchronous"


class Training:
    """A prepared model that takes steps and saves."""

    def __init__(self, stage: int, gigabytes: float, folder: Path, cpu: bool) -> None:
        section = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
        config = {"distributed_type": "DEEPSPEED", "use_cpu": cpu, "deepspeed_config": section}
        self.accelerator = Accelerator(config=config)
        layers = round(gigabytes * 2**30 / LAYER**2 / 4)
        with self.accelerator.init_model():
            net = nn.Sequential(*(nn.Linear(LAYER, LAYER, bias=False) for _ in range(layers)))
        adamw = torch.optim.AdamW(net.parameters(), lr=1e-5)
        self.model, self.optimizer = self.accelerator.prepare(net, adamw)
        self.batch = torch.ones(1, LAYER, device=self.accelerator.device)
        self.folder = folder
        self.next_step = 0.0  # seconds of the step after the last save

    def step(self) -> float:
        """Take a step and return its seconds."""
        start = time.perf_counter()
        self.accelerator.backward(self.model(self.batch).square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.wait_for_device()
        return time.perf_counter() - start

    def wait_for_device(self) -> None:
        if self.batch.is_cuda:
            torch.cuda.synchronize()

    def save(self, *, asynchronous: bool) -> float:
        """Save and return the seconds that the loop waits, in the call and in the next step.

        The disk has no other data to write.
        """
        self.forget()
        os.sync()
        self.wait_for_device()
        dist.barrier()
        start = time.perf_counter()
        self.accelerator.save_state(self.folder / "state", asynchronous=asynchronous)
        returned = time.perf_counter()
        self.accelerator.backward(self.model(self.batch).square().mean())
        self.wait_for_device()
        waits_from = time.perf_counter()
        if (wait := self.optimizer.session.before_change) is not None:
            wait()
        waits_to = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.next_step = time.perf_counter() - returned
        return returned - start + waits_to - waits_from

    def steps_behind(self) -> list[float]:
        """Return the seconds of each step that begins before the save is complete."""
        taken = []
        while not self.accelerator.gather(torch.tensor(float((self.folder / "state").exists()))).any():
            taken.append(self.step())
        self.accelerator.wait_for_save()
        return taken

    def forget(self) -> None:
        """Remove the last save."""
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder / "state", ignore_errors=True)
        dist.barrier()


def measure(rank: int, world: int, stage: int, file: Path, options: argparse.Namespace) -> None:
    """Run all rounds in every process; the first process keeps the results after each round."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ["DS_ACCELERATOR"] = "cpu" if options.cpu else "cuda"
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # read by DeepSpeed, not used
    torch.set_num_threads(1)
    backend = "gloo" if options.cpu else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{file.parent}/store", rank=rank, world_size=world)
    training = Training(stage, options.gigabytes, file.parent, options.cpu)
    training.step()
    results: dict[str, Any] = {"first": training.save(asynchronous=True), "quiet": [], "behind": []}
    training.steps_behind()
    pauses = Timings({ORDINARY: [], ASYNCHRONOUS: []})
    for index in range(options.rounds):
        for name in (ORDINARY, ASYNCHRONOUS) if index % 2 else (ASYNCHRONOUS, ORDINARY):
            results["quiet"] += [training.step() for _ in range(3)]
            pauses[name].append(training.save(asynchronous=name == ASYNCHRONOUS))
            if rank == 0:
                print(f"stage {stage}, {index + 1}, {name}: {pauses[name][-1]:.3f} s", file=sys.stderr, flush=True)
            if name == ASYNCHRONOUS:
                results["behind"] += [training.next_step, *training.steps_behind()]
        if rank == 0:
            keep(file, {**results, "pauses": pauses})
    training.forget()
    training.accelerator.end_training()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of fp32 parameters (default 1)")
    parser.add_argument("--rounds", type=int, default=5, help="saves of each kind (default 5)")
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 3], help="ZeRO stages (default 2 3)")
    parser.add_argument("--processes", type=int, default=2, help="default 2")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk to write to (default %(default)s)")
    parser.add_argument("--cpu", action="store_true", default=not torch.cuda.is_available(), help="even with a GPU")
    options = parser.parse_args()
    table = Table(
        title=f"pause of the loop in save_state, {options.gigabytes:g} GB of fp32 parameters with Adam's states, "
        f"{options.processes} processes; target: ratio <= 0.10",
        caption=f"{describe_run('zero-plugin', 'torch', 'deepspeed')}; {options.rounds} rounds",
        caption_justify="left",
        box=MARKDOWN,
    )
    table.add_column("stage")
    for column in (
        f"{ORDINARY}, s",
        f"{ASYNCHRONOUS}, s",
        "the first, s",
        "ratio",
        "step, s",
        "step during a save, s",
        "ratio",
    ):
        table.add_column(column, justify="right")
    for stage, results in zip(options.stages, measure_cases(measure, options.stages, options), strict=True):
        if results is None:
            table.add_row(str(stage), LATE)
            continue
        pauses, quiet, behind = Timings(results["pauses"]), median(results["quiet"]), results["behind"]
        done = len(pauses[ASYNCHRONOUS])
        table.add_row(
            str(stage) if done == options.rounds else f"{stage}, {done} of {options.rounds} rounds",
            f"{pauses.seconds(ORDINARY):.2f}",
            f"{pauses.seconds(ASYNCHRONOUS):.3f}",
            f"{results['first']:.3f}",
            f"{pauses.ratio(ASYNCHRONOUS, ORDINARY):.3f}",
            f"{quiet:.2f}",
            f"{median(behind):.2f}",
            f"{median(behind) / quiet:.2f}",
        )
    Console(width=WIDTH).print(table)


if __name__ == "__main__":
    main()
