"""Measure the time from the command to the first step, and the part of `prepare`, against the same training by hand.

By hand means torchrun and plain torch, DDP or `deepspeed.initialize`; ours means `zero-plugin launch` and `prepare`.
Both have the same model, batch and optimizer. Rounds alternate; the column `by hand again` repeats the first contender.

    python benchmarks/first_step.py --pairs 5 --processes 1 2
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from pairs import WIDTH, Timings, describe_run, take_turns
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

BY_HAND, AGAIN, OURS = "by hand", "by hand again", "zero_plugin"
STAGES = {"without ZeRO": None, "ZeRO-2": 2, "ZeRO-3": 3}
LAYERS, WIDTH_OF_LAYER = 8, 256

MODEL = f"""
import torch
model = torch.nn.Sequential(*[torch.nn.Linear({WIDTH_OF_LAYER}, {WIDTH_OF_LAYER}) for _ in range({LAYERS})])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x = torch.ones(4, {WIDTH_OF_LAYER})
"""
# All processes first meet at a barrier, so the timed part does not include waiting for a process that started later.
TIMED = """
import torch.distributed as dist
dist.is_initialized() and dist.barrier()
begin = time.perf_counter()
{prepare}
seconds = time.perf_counter() - begin
{step}
with open(f"{{sys.argv[1]}}/{{os.environ.get('RANK', '0')}}.json", "w") as file:
    json.dump([time.time(), seconds], file)
{end}
"""
HEAD = "import json, os, sys, time\n"
END = "dist.is_initialized() and (dist.barrier(), dist.destroy_process_group())"


def script_by_hand(stage: int | None, processes: int) -> str:
    """Return the script of the training by hand."""
    if stage is None:
        begin = "" if processes == 1 else 'torch.distributed.init_process_group("gloo")\n'
        prepare = "" if processes == 1 else "model = torch.nn.parallel.DistributedDataParallel(model)"
        step = "model(x).square().mean().backward()\noptimizer.step()"
        return HEAD + MODEL + begin + TIMED.format(prepare=prepare, step=step, end="del model\n" + END)
    begin = 'import deepspeed\ndeepspeed.init_distributed("gloo")\n'
    prepare = f"engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config={training_of(stage)})"
    step = "engine.backward(engine(x).square().mean())\nengine.step()"
    return HEAD + MODEL + begin + TIMED.format(prepare=prepare, step=step, end="engine.destroy()\ndel engine\n" + END)


def script_of_ours() -> str:
    """Return the script of the same training with an Accelerator, for any configuration."""
    begin = "from zero_plugin import Accelerator\naccelerator = Accelerator()\n"
    prepare = "model, optimizer = accelerator.prepare(model, optimizer)"
    step = "accelerator.backward(model(x).square().mean())\noptimizer.step()"
    return HEAD + MODEL + begin + TIMED.format(prepare=prepare, step=step, end="accelerator.end_training()")


def training_of(stage: int) -> dict[str, object]:
    """Return the DeepSpeed configuration."""
    return {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}


def write_scripts(folder: Path, stage: int | None, processes: int) -> dict[str, list[str]]:
    """Write the scripts; return each contender's command without its last argument, a folder."""
    (folder / "hand.py").write_text(script_by_hand(stage, processes))
    (folder / "ours.py").write_text(script_of_ours())
    kind = ("NO" if processes == 1 else "MULTI_CPU") if stage is None else "DEEPSPEED"
    settings: dict[str, object] = {"distributed_type": kind, "use_cpu": True, "num_processes": processes}
    settings |= {} if stage is None else {"deepspeed_config": training_of(stage)}
    (folder / "run.json").write_text(json.dumps(settings))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]  # torchrun would pass port 0 to its workers unchanged
    hand = ["torch.distributed.run", f"--nproc-per-node={processes}", f"--master-port={port}", str(folder / "hand.py")]
    ours = ["zero_plugin", "launch", "--config_file", str(folder / "run.json"), str(folder / "ours.py")]
    return {name: [sys.executable, "-m", *command] for name, command in ((BY_HAND, hand), (AGAIN, hand), (OURS, ours))}


def run_once(command: list[str], prepares: list[float]) -> float:
    """Return the seconds from the command to the last process's first step; append those of `prepare` to `prepares`."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        start = time.time()
        done = subprocess.run(
            [*command, folder], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
        found = [json.loads(file.read_text()) for file in Path(folder).glob("*.json")]
    prepares.append(max(seconds for _, seconds in found))
    return max(ended for ended, _ in found) - start


def measure(commands: dict[str, list[str]], rounds: int) -> tuple[Timings, Timings]:
    """Return each contender's seconds to the first step, and those of `prepare`; a first round is not counted."""
    totals, prepares = ({name: list[float]() for name in commands} for _ in range(2))

    def once(name: str) -> None:
        totals[name].append(run_once(commands[name], prepares[name]))

    take_turns({name: partial(once, name) for name in commands}, rounds)
    return tuple(Timings({name: seconds[1:] for name, seconds in each.items()}) for each in (totals, prepares))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="rounds per row (default 5)")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="numbers of workers (default 1 2)")
    arguments = parser.parse_args()
    console = Console(width=WIDTH)
    table = Table(
        title="the first step, seconds", caption=describe_run("zero-plugin", "torch", "deepspeed"), box=MARKDOWN
    )
    columns = ("processes", "strategy", "first step", AGAIN, "ours", "target", "prepare", AGAIN, "ours", "target")
    for column in columns:
        table.add_column(column, justify="left" if column == "strategy" else "right")
    for processes in arguments.processes:
        for strategy, stage in STAGES.items():
            with tempfile.TemporaryDirectory() as folder:
                totals, prepares = measure(write_scripts(Path(folder), stage, processes), arguments.pairs)
            table.add_row(
                str(processes),
                strategy,
                f"{totals.seconds(BY_HAND):.2f}",
                *(f"{totals.extra(name, BY_HAND):+.2f}" for name in (AGAIN, OURS)),
                "<= +0.30",
                f"{prepares.seconds(BY_HAND):.3f}",
                *(f"{prepares.extra(name, BY_HAND):+.3f}" for name in (AGAIN, OURS)),
                "<= 1.05x",
            )
    console.print(table)


if __name__ == "__main__":
    main()
