"""Runs jobs of several processes, which it forks: they have everything imported. One line of JSON in, one out.

A request has: `job`, a module whose `run(board, **arguments)` every process calls, in a process group; `world`, how
many processes; `folder` for their logs; `seconds` that they may take; and `kill`, what is killed when, or null:

* `watch`, `phase` and `count`: when process `watch` comes into its `count`-th phase of that kind; or `after` seconds;
* `ranks`, those that get SIGKILL; `grace`, seconds that the others have then, before a launcher would kill them.

`test` names the test, see line_contexts.py.

The reply has the processes' exit `codes` (null where the time was over) and `board`, a row of numbers for each process:
its phase (index into PHASES), how often it has been in each, and what the job writes from `FREE` on.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import json
import mmap
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
import torch.distributed as dist
from forked import IMPORTED_BEFORE
from line_contexts import enter_context

PHASES = ("none", "write", "fsync", "rename", "rotate")
FREE = 8  # first number of a row that is the job's own
_ROW = 16
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however it does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def run_job(request: dict[str, Any], number: int) -> dict[str, Any]:
    """Fork the processes of a request, and wait for them."""
    world, folder = request["world"], Path(request["folder"])
    run = importlib.import_module(request["job"]).run
    board = np.frombuffer(mmap.mmap(-1, 8 * _ROW * world), np.int64).reshape(world, _ROW)
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            enter_context(request["test"])
            _be_process(rank, world, folder, number, functools.partial(run, board, **request["arguments"]))
        pids.append(pid)
    codes = _watch(pids, board, request["kill"], request["seconds"])
    return {"codes": codes, "board": board.tolist()}


def _be_process(rank: int, world: int, folder: Path, number: int, run: Any) -> None:
    code = 1
    try:
        end_with_parent()
        log = os.open(folder / f"run-{number}-{rank}.log", os.O_WRONLY | os.O_CREAT)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        store = f"file://{folder / f'store-{number}'}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))
        run()
        dist.barrier()
        dist.destroy_process_group()
        code = 0
    except BaseException:  # noqa: BLE001 - a fork must not come back
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _watch(pids: list[int], board: Any, kill: dict[str, Any] | None, seconds: float) -> list[int | None]:
    began = time.monotonic()
    codes: list[int | None] = [None] * len(pids)
    running = dict(enumerate(pids))
    deadline = began + seconds
    while running:
        now = time.monotonic()
        if kill is not None and _is_due(kill, board, now - began):
            _kill(running[rank] for rank in kill["ranks"] if rank in running)
            deadline, kill = now + kill["grace"], None
        if now > deadline:
            _kill(running.values())
        for rank, pid in tuple(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del running[rank]
                codes[rank] = os.waitstatus_to_exitcode(status) if now <= began + seconds else None
                if codes[rank] == 1:
                    deadline = min(deadline, now + 20)
        time.sleep(0.005 if kill is None else 0.0002)
    return codes


def _is_due(kill: dict[str, Any], board: Any, elapsed: float) -> bool:
    if "after" in kill:
        return elapsed >= kill["after"]
    phase = PHASES.index(kill["phase"])
    row = board[kill["watch"]]
    return bool(row[0] == phase and row[phase] >= kill["count"])


def _kill(pids: Any) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Answer requests until the input ends."""
    end_with_parent()
    for module in IMPORTED_BEFORE:
        importlib.import_module(module)
    torch.set_num_threads(1)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the forks' imports print is no reply
    gc.collect()
    gc.freeze()  # else every end_training() walks all that the imports made
    for number, line in enumerate(sys.stdin):
        print(json.dumps(run_job(json.loads(line), number)), file=replies, flush=True)


if __name__ == "__main__":
    main()
