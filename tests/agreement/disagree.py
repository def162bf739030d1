"""Training scripts of two processes that do not agree: FOLDER PATH:HOW… SECONDS.

Python and torch start once; every process of every script is forked off there. The output of each goes to
FOLDER/PATH-HOW-RANK.log, the exit codes to FOLDER/codes.json.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
import torch.distributed as dist

from zero_plugin import Accelerator
from zero_plugin.agreement import Patience, start_watching


def script(folder: Path, path: str, how: str, rank: int) -> None:
    """Train two steps together, then each process goes its own way."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    store = f"file://{folder}/{path}-{how}.store"
    limit = timedelta(seconds=10 if how == "overdue" else 60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=limit)
    start_watching(Patience(tick=0.2, asks=0.6, late=1.0))
    zero = {"stage": int(path[-1]), "stage3_param_persistence_threshold": 0} if path.startswith("zero") else None
    config = {"use_cpu": True, "distributed_type": "DEEPSPEED" if zero else "MULTI_CPU"}
    accelerator = Accelerator(config=config | ({"deepspeed_config": {"zero_optimization": zero}} if zero else {}))
    model = torch.nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def train() -> None:
        accelerator.backward(model(torch.ones(2, 4)).square().sum())
        optimizer.step()
        optimizer.zero_grad()

    def gather() -> None:
        accelerator.gather(torch.ones(1))

    for _ in range(2):
        train()
        gather()
    (folder / f"{path}-{how}-{rank}.trained").touch()
    first = accelerator.is_main_process
    if how == "save_alone":
        if first:
            accelerator.save_model(model, folder / "saved")
        train()
    elif how == "state_alone":
        if first:
            accelerator.get_state_dict(model)
        train()
    elif how == "saves_alone":
        if first:
            accelerator.save_state(folder / "checkpoint")
        train()
    elif how == "loads_alone":
        accelerator.save_state(folder / "before")
        if first:
            accelerator.load_state(folder / "before")
        train()
    elif how == "gather_alone":
        if first:
            gather()
        train()
    elif how == "wait_alone":
        if first:
            accelerator.wait_for_everyone()
        train()
    elif how == "long_calls":
        accelerator.get_state_dict(model) if first else accelerator.save_model(model, folder / "saved")
    elif how == "short_calls":
        gather() if first else accelerator.reduce(torch.ones(1))
    elif how == "leaves":
        if not first:
            return
        gather()
    elif how == "fails":
        if not first:
            raise ValueError("the script's own error")
        gather()
    elif how == "memory":
        if not first:
            atexit.register(time.sleep, 8)  # its connections are not closed before
            bytearray(1 << 60)
        train()
    elif how == "more_steps":
        if not first:
            train()
    elif how == "overdue":
        if first:
            accelerator.get_state_dict(model)
        time.sleep(25)
    elif how == "late":
        for call in (lambda: accelerator.get_state_dict(model), gather):
            if not first:
                time.sleep(3)
            call()


def fork(folder: Path, path: str, how: str, rank: int) -> int:
    """The process id of one process of a script, which ends as Python does: with atexit, and its exit code."""
    child = os.fork()
    if child:
        return child
    log = os.open(folder / f"{path}-{how}-{rank}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    script(folder, path, how, rank)
    sys.exit(0)


def main() -> None:
    """Start all, wait for all, and end whatever is left when the time is over."""
    folder, deadline = Path(sys.argv[1]), time.monotonic() + float(sys.argv[-1])
    scripts = sorted(sys.argv[2:-1], key=lambda name: not name.endswith(":overdue"))
    running = {}
    for name in scripts:
        path, how = name.split(":")
        started = {fork(folder, path, how, rank): f"{path}-{how}-{rank}" for rank in range(2)}
        running.update(started)
        # Its time-out is short from the beginning: what the others load must not make its first calls late.
        while how == "overdue" and time.monotonic() < deadline:
            if all((folder / f"{process}.trained").exists() for process in started.values()):
                break
            time.sleep(0.05)
    codes: dict[str, int | None] = dict.fromkeys(running.values())
    while running and time.monotonic() < deadline:
        for child in list(running):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                codes[running.pop(child)] = os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    for child in running:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    (folder / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main()
