"""A fault hits one rank at some moment of a training: the run ends soon, names that rank, and leaves nothing."""

from __future__ import annotations

import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import Workers, needs_proc

pytestmark = [
    pytest.mark.programs,
    pytest.mark.processes,
    pytest.mark.timeout(1200),
    needs_proc,
]

SCRIPT = Path(__file__).parent / "disturbed.py"
MOMENTS = ("start", "group", "prepare", "forward", "backward", "step", "save", "gather", "end")
# For each fault: the launch's exit code, and the possible messages about the rank.
FAULTS = {
    "kill": (137, "rank {rank} was ended by signal 9 (SIGKILL)"),
    "segfault": (139, "rank {rank} was ended by signal 11 (SIGSEGV)"),
    "abort": (134, "rank {rank} was ended by signal 6 (SIGABRT)"),
    "terminate": (143, "rank {rank} was ended by signal 15 (SIGTERM)"),
    "exception": (1, "rank {rank} failed first, with exit code 1"),
    "memory": (1, "rank {rank} failed first, with exit code 1"),
    "exit": (3, "rank {rank} failed first, with exit code 3"),
    "leave": (1, "rank {rank} did not run at that time: it had ended, with exit code 0"),
    # A process with an `Accelerator` ends so if the others have not reached its end.
    "sys_exit": (
        1,
        "rank {rank} did not run at that time: it had ended, with exit code 0",
        "process {rank} is in end_training() (its end)",
        "rank {rank} failed first, with exit code 1",
    ),
    "stop": (1, "rank {rank} did not run at that time: it was stopped by a signal (SIGSTOP, Ctrl-Z)"),
    "loop": (1, "rank {rank} was still running at that time, at disturbed.py:"),
    "deadlock": (1, "rank {rank} was still running at that time, at disturbed.py:"),
    "sleep": (1, "rank {rank} was still running at that time, at disturbed.py:"),
}
PYTHONS_OWN = ("exception", "memory")
DAILY = (
    ("start", "leave", 0),
    ("prepare", "stop", 0),
    ("forward", "loop", 0),
    ("save", "kill", 0),
    ("step", "exit", 2),
)
AT_ZERO_2 = ("backward", "step", "save")


def kinds() -> Iterator[object]:
    for fault in FAULTS:
        for moment in MOMENTS[: -1 if fault == "sys_exit" else None]:  # which is no fault at the end
            for stage in (0, 2) if moment in AT_ZERO_2 else (0,):
                marks = () if (moment, fault, stage) in DAILY else pytest.mark.campaign
                yield pytest.param(moment, fault, stage, marks=marks, id=f"{moment}-{fault}-{stage}")


@pytest.mark.parametrize(("moment", "fault", "stage"), list(kinds()))
def test_a_rank(
    moment: str,
    fault: str,
    stage: int,
    start: Callable[..., subprocess.Popen[str]],
    forked_alone: dict[str, str],
    tried: Callable[..., dict[str, Any]],
) -> None:
    """The run ends within the bound, with the right code and message, and does not blame the other rank."""
    rank = (len(moment) + len(fault)) % 2
    workers = Workers(uuid.uuid4().hex)
    limit = "20" if (moment, fault, stage) in DAILY else "8"  # a slow machine is no fault
    row = tried(f"a rank: {fault}", 1)
    launcher = start(
        *("--cpu", "--num_processes", "2", str(SCRIPT), moment, fault, str(rank), str(stage), limit, workers.mark),
        OMP_NUM_THREADS="1",
        **forked_alone,
    )
    ports = {int(environment["MASTER_PORT"]) for _, environment in workers.wait_for(2, launcher).values()}
    began = time.monotonic()
    errors = workers.finish(launcher, ports)
    row["ended in time"], row["slowest s"] = 1, time.monotonic() - began
    code, *words = FAULTS[fault]
    assert (launcher.returncode, any(said.format(rank=rank) in errors for said in words)) == (code, True), errors
    other = 1 - rank
    assert f"rank {other} failed first" not in errors or fault == "sys_exit"
    assert f"rank {other} was ended" not in errors
    if fault == "segfault":
        assert "in string_at" in errors, errors  # the Python line
    if fault in PYTHONS_OWN:
        assert errors.count("Traceback") == 1, errors
    row["right message"] = 1
