"""Trains a small model in which a FAULT hits RANK at MOMENT: MOMENT FAULT RANK STAGE LIMIT, and a mark.

LIMIT is the process group's time-out in seconds, which soon ends ranks that wait without success.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from zero_plugin import Accelerator, InitProcessGroupKwargs, ProjectConfiguration


def exhaust_memory() -> None:
    """Allocate more memory than the process may have."""
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    torch.empty(1 << 50, dtype=torch.uint8)


def deadlock() -> None:
    """Wait for a lock that this thread holds."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def loop() -> None:
    """Compute in an endless loop at the lowest priority."""
    os.nice(19)
    while True:
        pass


def fail() -> None:
    """Raise."""
    raise ValueError("boom")


FAULTS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "exception": fail,
    "memory": exhaust_memory,
    "exit": lambda: os._exit(3),
    "leave": lambda: os._exit(0),
    "sys_exit": lambda: sys.exit(0),
    "loop": loop,
    "deadlock": deadlock,
    "sleep": lambda: time.sleep(1000),
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "nothing": lambda: None,
}


def main(moment: str, fault: str, rank: int, stage: int, limit: float) -> None:
    """Train six steps, with a checkpoint after the third."""

    def reach(name: str) -> None:
        if name == moment and int(os.environ["RANK"]) == rank:
            FAULTS[fault]()

    reach("start")
    section = {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True} if stage else None
    accelerator = Accelerator(
        config=section,
        project_config=ProjectConfiguration("out", automatic_checkpoint_naming=True),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=limit))],
    )
    reach("group")
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.randn(48, 8))
    reach("prepare")
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4))
    for number, (batch,) in enumerate(loader):
        if number == 2:
            if fault == "loop":  # the next call times out however slow the machine is, and keeps a core busy
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3))
            reach("forward")
        loss = model(batch).square().mean()
        if number == 2:
            loss.register_hook(lambda gradient: reach("backward"))
        accelerator.backward(loss)
        if number == 2:
            reach("step")
        optimizer.step()
        optimizer.zero_grad()
        if number == 2:
            reach("save")
            accelerator.save_state()
            reach("gather")
            accelerator.gather(loss.detach())
    reach("end")
    accelerator.end_training()
    reach("ended")
    Path(f"done{rank}").touch()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
