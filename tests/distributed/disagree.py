"""One process of a two-process training script whose processes disagree: FOLDER PATH:HOW RANK."""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
import torch.distributed as dist
from torch.utils import cpp_extension

from zero_plugin import Accelerator, DistributedDataParallelKwargs
from zero_plugin.distributed.collective_check import Patience, start_watching
from zero_plugin.tracking import GeneralTracker


def script(folder: Path, path: str, how: str, rank: int) -> None:
    """Train two steps together. Then each process makes its own calls."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    store = f"file://{folder}/{path}-{how}.store"
    limit = timedelta(seconds=10 if how == "overdue" else 60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=limit)
    start_watching(Patience(tick=0.2, asks=0.6, late=1.0, builds=1.0))
    zero = {"stage": int(path[-1]), "stage3_param_persistence_threshold": 0} if path.startswith("zero") else None
    config = {"use_cpu": True, "distributed_type": "DEEPSPEED" if zero else "MULTI_CPU"}
    config |= {"deepspeed_config": {"zero_optimization": zero}} if zero else {}
    handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)] if how == "branches" else []
    notes = Notes(folder / f"{path}-{how}.notes")
    accelerator = Accelerator(config=config, log_with=notes, kwargs_handlers=handlers)
    model: torch.nn.Module = torch.nn.Linear(4, 4)
    if how == "wait_alone":  # DDP broadcasts its buffers in a forward
        model = torch.nn.Sequential(model, torch.nn.BatchNorm1d(4))
    elif how == "branches":
        model = Branches()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def train() -> None:
        accelerator.backward(model(torch.ones(2, 4)).square().sum())
        optimizer.step()
        optimizer.zero_grad()

    def gather() -> None:
        accelerator.gather(torch.ones(1))

    def gather_alone() -> None:
        if first:
            gather()
        train()

    first = accelerator.is_main_process
    for _ in range(2):
        train()
        gather()
    (folder / f"{path}-{how}-{rank}.trained").touch()
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
        gather_alone()
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
    elif how == "breaks":
        data = torch.utils.data.TensorDataset(torch.ones(32, 4))
        loader = accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=2, shuffle=True))
        for _ in range(2):
            for _ in loader:
                train()
                if first:
                    break
    elif how == "raises_exit":
        if first:
            raise SystemExit(3)
        train()
    elif how == "overdue":
        if first:
            accelerator.get_state_dict(model)
        while "LoopError" not in (folder / f"{path}-{how}-0.log").read_text():
            time.sleep(0.1)
    elif how == "late":
        for call in (lambda: accelerator.get_state_dict(model), gather):
            if not first:
                time.sleep(3)
            call()
    elif how == "vanishes":
        if not first:
            time.sleep(1)
            os._exit(0)
        accelerator.get_state_dict(model)
    elif how == "flushes":
        accelerator.init_trackers("run")
        pauses = [3.0]
        os.fsync = lambda _: time.sleep(pauses.pop() if pauses else 0)  # the save continues when the mistake is found
        accelerator.save_state(folder / "behind", asynchronous=True)
        gather_alone()
    elif how in HEALTHY:
        for step in HEALTHY[how]:
            print(f"== {step.__name__}", file=sys.stderr, flush=True)
            todo = step(accelerator, model, folder)
            next(todo, None)
            gather()
            next(todo, None)
        print("== end", file=sys.stderr, flush=True)
    elif how == "branches":
        train()
        if first:
            time.sleep(3)
        gather()
    elif how == "evaluates":
        with gathered(model), torch.no_grad():
            for _ in range(6 if first else 0):
                model(torch.ones(2, 4))
                time.sleep(0.5)
            accelerator.wait_for_everyone()


# ---- What a script may do for three seconds before a collective call, made at the yield ------------------------------


def sends(accelerator: Accelerator, model: torch.nn.Module, folder: Path) -> Iterator[None]:
    """Send in the group of all processes. The message is received after the call."""
    if accelerator.is_main_process:
        yield
        dist.recv(torch.ones(1), 1)
    else:
        sent = torch.ones(1)
        work = dist.isend(sent, 0)
        time.sleep(3)
        yield
        work.wait()


def own_group(accelerator: Accelerator, model: torch.nn.Module, folder: Path) -> Iterator[None]:
    """Sum in a group of the script's own. One process starts the sum before the call, the other after it."""
    group, numbers = dist.new_group(), torch.ones(1)
    if accelerator.is_main_process:
        yield
        dist.all_reduce(numbers, group=group)
    else:
        work = dist.all_reduce(numbers, group=group, async_op=True)
        time.sleep(3)
        yield
        work.wait()


def uneven(accelerator: Accelerator, model: torch.nn.Module, folder: Path) -> Iterator[None]:
    """Run more backwards on one process; the other joins."""
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for _ in range(1 if accelerator.is_main_process else 3):
            accelerator.backward(model(torch.ones(2, 4)).square().sum())
    if not accelerator.is_main_process:
        time.sleep(3)
    yield


def goes_first(accelerator: Accelerator, model: torch.nn.Module, folder: Path) -> Iterator[None]:
    """Let the main process go first, as for a download."""
    with accelerator.main_process_first():
        if accelerator.is_main_process:
            time.sleep(3)
    yield


def imports(accelerator: Accelerator, model: torch.nn.Module, folder: Path) -> Iterator[None]:
    """Import a module that takes long."""
    if not accelerator.is_main_process:
        (folder / "slow_module.py").write_text("import time\ntime.sleep(3)\n")
        sys.path.insert(0, str(folder))
        importlib.import_module("slow_module")
    yield


def saves(accelerator: Accelerator, model: torch.nn.Module, folder: Path) -> Iterator[None]:
    """Run `torch.save` by hand to a slow disk, simulated by a pipe that is read after three seconds."""
    if not accelerator.is_main_process:
        pipe = folder / "pipe"
        os.mkfifo(pipe)
        threading.Timer(3, pipe.read_bytes).start()
        torch.save({"weight": torch.ones(1)}, pipe, _use_new_zipfile_serialization=False)
    yield


def compiles(accelerator: Accelerator, model: torch.nn.Module, folder: Path) -> Iterator[None]:
    """Compile a C++ op with a compiler that takes long and fails."""
    if not accelerator.is_main_process:
        compiler = folder / "compiler"
        compiler.write_text("#!/bin/sh\nsleep 3\nexit 1\n")
        compiler.chmod(0o755)
        (folder / "slow_op.cpp").touch()
        os.environ.update(CXX=str(compiler), TORCH_DONT_CHECK_COMPILER_ABI="1")
        os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # ninja's
        with suppress(RuntimeError):
            cpp_extension.load("slow_op", str(folder / "slow_op.cpp"), build_directory=str(folder))
    yield


def stops(accelerator: Accelerator, model: torch.nn.Module, folder: Path) -> Iterator[None]:
    """Stop the process by a signal, and continue it."""
    if not accelerator.is_main_process:
        subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    yield


HEALTHY = {"healthy": (sends, own_group, uneven, goes_first), "busy": (imports, saves, compiles, stops)}


def gathered(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Gather all stage-3 parameters with DeepSpeed's function for scripts."""
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(model.parameters()))


class Branches(torch.nn.Module):
    """A model whose main process uses one layer and whose other processes use another."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.main if dist.get_rank() == 0 else self.other)(x)


class Notes(GeneralTracker):
    """A tracker that writes its values only when it is finished."""

    name = "notes"
    requires_logging_directory = False
    tracker = None

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def finish(self) -> None:
        self.file.write_text("finished")


if __name__ == "__main__":
    script(Path(sys.argv[1]), *sys.argv[2].split(":"), int(sys.argv[3]))
    sys.exit(0)
