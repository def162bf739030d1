"""Interrupted runs end in bounded time with the right code and message, and leave no process and no port."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from launching import BOUND_S, Workers, needs_proc, wait_until

from zero_plugin.machine.hardware import port_is_free

pytestmark = [
    pytest.mark.programs,
    pytest.mark.processes,
    pytest.mark.timeout(1200),
    needs_proc,
]

Start = Callable[..., "subprocess.Popen[str]"]

TRAIN = Path(__file__).parent / "train_interrupted.py"

# Fault, rank and moment are arguments, followed by a mark that identifies the processes.
LOOP = """
import os, sys, time
from datetime import timedelta
fault, rank, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
import torch, torch.distributed as dist
began = time.monotonic()
dist.init_process_group("gloo", timeout=timedelta(seconds=4))
while True:
    dist.all_reduce(torch.ones(1000))
    time.sleep(0.01)
    if dist.get_rank() == rank and time.monotonic() - began > seconds:
        if fault == "exception":
            raise ValueError("boom")
        if fault == "exit":
            os._exit(3)
        if fault == "leave":
            os._exit(0)
"""
FAULTS = ("kill", "terminate", "stop", "exception", "exit", "leave")
CODES = {"kill": 137, "terminate": 143, "stop": 1, "exception": 1, "exit": 3, "leave": 1}


def disturb(start: Start, tmp_path: Path, fault: str, world: int, rank: int, seconds: float) -> None:
    """Run with one fault on one rank, some seconds after the start, and check the end."""
    (tmp_path / "loop.py").write_text(LOOP)
    workers = Workers(uuid.uuid4().hex)
    launcher = start(
        *("--cpu", "--num_processes", str(world), "loop.py", fault, str(rank), str(seconds), workers.mark),
        OMP_NUM_THREADS="1",
    )
    found = workers.wait_for(world)
    if fault in ("kill", "terminate", "stop"):
        time.sleep(seconds)
        if fault == "terminate":
            launcher.terminate()
        else:
            os.kill(found[rank][0], signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    errors = workers.finish(launcher, {int(environment["MASTER_PORT"]) for _, environment in found.values()})
    assert launcher.returncode == CODES[fault], errors
    assert {
        "kill": f"rank {rank} was ended by signal 9 (SIGKILL)",
        "terminate": "stopped by SIGTERM",
        "stop": f"rank {rank} did not run at that time: it was stopped by a signal",
        "exception": f"rank {rank} failed first, with exit code 1",
        "exit": f"rank {rank} failed first, with exit code 3",
        "leave": f"rank {rank} did not run at that time: it had ended, with exit code 0",
    }[fault] in errors, errors
    if fault == "exception":
        assert errors.count("ValueError: boom") == 1
        assert errors.count("Traceback") == 1


class Training:
    """Starts of the training script in a separate folder, one after another.

    Args:
        start: starts a launcher.
        folder: where the launcher runs.
        stage: ZeRO stage; 0 is DDP.
    """

    def __init__(self, start: Start, folder: Path, stage: int) -> None:
        self._start, self._stage = start, stage
        self.out = folder / uuid.uuid4().hex
        self.workers = Workers(self.out.name)

    def start(
        self, *flags: str, pause: float = 0.15, fault: tuple[str, ...] = (), **forks: str
    ) -> subprocess.Popen[str]:
        """Start the script again, with `pause` seconds after each of its 16 steps."""
        script = (str(TRAIN), self.out.name, str(self._stage), str(pause), *fault)
        return self._start("--cpu", "--num_processes", "2", *flags, *script, OMP_NUM_THREADS="1", **forks)

    def finish(self, launcher: subprocess.Popen[str]) -> tuple[int, str]:
        """Return exit code and stderr."""
        errors = self.workers.finish(launcher)
        return launcher.returncode, errors

    def result(self) -> Any:
        """Return steps, losses and sums of weights at the end, bit by bit."""
        return json.loads((self.out / "final.json").read_text())


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, Any]:
    """Return each stage's result without a fault, cached."""
    return {}


def expect_same_end(training: Training, stage: int, undisturbed: dict[int, Any], start: Start, folder: Path) -> None:
    """Assert that the disturbed training ended bitwise like one without a fault."""
    if stage not in undisturbed:
        plain = Training(start, folder, stage)
        assert plain.finish(plain.start(pause=0))[0] == 0
        undisturbed[stage] = plain.result()
    assert training.result() == undisturbed[stage]


def test_a_restart_and_a_request_to_stop(
    start: Start,
    tmp_path: Path,
    lines_of: Callable[..., Iterator[str]],
    forked_workers: dict[str, str],
) -> None:
    """After a kill the run resumes from its checkpoint, after SIGTERM the next start does. The final bits are equal."""
    training = Training(start, tmp_path, 0)
    launcher = training.start("--max_restarts", "1", fault=("kill", "1", "7"), **forked_workers)
    assert launcher.stdout is not None
    started = list(islice(lines_of(launcher.stdout), 4))
    assert started == ["started at 0\n"] * 2 + ["started at 6\n"] * 2
    time.sleep(0.5)
    launcher.terminate()
    code, errors = training.finish(launcher)
    assert code == 143
    assert "rank 1 was ended by signal 9 (SIGKILL); all workers start again (restart 1 of 1)" in errors
    assert "stopped by SIGTERM" in errors
    assert not (training.out / "final.json").exists()
    code, errors = training.finish(training.start("--auto_resume", pause=0, fault=("again",), **forked_workers))
    assert (code, "restored weights, optimizers, orders of the loaders, random states" in errors) == (0, True), errors
    assert training.result() == json.loads((training.out / "again" / "final.json").read_text())


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(35))
def test_any_fault_at_any_moment(seed: int, start: Start, tmp_path: Path) -> None:
    """A random fault hits a random rank of two or three during start, rendezvous or computation."""
    draw = random.Random(seed)
    fault, world = FAULTS[seed % len(FAULTS)], draw.choice((2, 3))
    disturb(start, tmp_path, fault, world, draw.randrange(world), draw.choice((0.0, draw.uniform(0, 6))))


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(12))
def test_any_interruption_of_a_training(seed: int, start: Start, tmp_path: Path, undisturbed: dict[int, Any]) -> None:
    """Random kills of ranks, then a SIGTERM, then --auto_resume give the undisturbed run's end."""
    draw = random.Random(100 + seed)
    stage = (0, 2)[seed % 2]
    training = Training(start, tmp_path, stage)
    launcher = training.start("--max_restarts", "2", pause=0.5)  # its end is later than the second kill
    assert launcher.stdout is not None
    for _ in range(2):
        assert [launcher.stdout.readline()[:10] for _ in range(2)] == ["started at"] * 2
        found = training.workers.wait_for(2)
        time.sleep(draw.uniform(0, 2))
        os.kill(found[draw.randrange(2)][0], signal.SIGKILL)
    time.sleep(draw.uniform(0, 12))
    launcher.terminate()
    code, errors = training.finish(launcher)
    assert code in (143, 0), errors  # 0: it was faster
    assert errors.count("all workers start again") in (1, 2), errors  # 1: SIGTERM came before the second
    code, errors = training.finish(training.start("--auto_resume", pause=0))
    assert code == 0, errors
    expect_same_end(training, stage, undisturbed, start, tmp_path)


@pytest.mark.campaign
def test_a_machine_that_is_lost_and_comes_back(
    start: Start, tmp_path: Path, undisturbed: dict[int, Any], free_port: Callable[[], int]
) -> None:
    """One of two launchers is killed and restarted. The other waits, and both resume from the checkpoint."""
    training = Training(start, tmp_path, 0)
    port = free_port()
    endpoint = f"127.0.0.1:{port}"
    flags = ("--num_machines", "2", "--rdzv_backend", "c10d", "--rdzv_endpoint", endpoint, "--max_restarts", "2")

    def join() -> subprocess.Popen[str]:
        return training.start(*flags, pause=0.5)

    stays = join()
    wait_until(lambda: not port_is_free(port))
    lost = join()
    assert lost.stdout is not None
    assert lost.stdout.readline() == "started at 0\n"
    while not (training.out / "checkpoints" / "checkpoint_1").exists():
        assert lost.poll() is None
        time.sleep(0.05)
    lost.kill()
    lost.communicate()
    back = join()
    assert back.wait(BOUND_S) == 0
    code, errors = training.finish(stays)
    assert code == 0, errors
    assert "all workers start again (restart 1 of 2)" in errors
    expect_same_end(training, 0, undisturbed, start, tmp_path)
