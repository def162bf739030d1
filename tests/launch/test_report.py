"""The rank that failed first, and the report about it."""

from __future__ import annotations

import socket
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from zero_plugin.launch.report import (
    HAD_ENDED,
    STOPPED,
    TERMINATED,
    FirstFailure,
    describe_failure,
    describe_idle,
    find_first_failure,
    running_at,
    shell_code,
)
from zero_plugin.launch.worker import FAILURE_OF, FIRST_FAILURE, LOST_PEER
from zero_plugin.machine.hardware import MemoryWatch, largest_processes


@dataclass
class Ended:
    """torchrun's record of a worker that failed."""

    exitcode: int
    timestamp: int = 100
    pid: int = 1


@pytest.mark.parametrize(
    ("failures", "mark", "first"),
    [
        ({0: Ended(-15), 1: Ended(3)}, None, (1, 3)),
        ({0: Ended(1), 1: Ended(1)}, "1 1", (1, 1)),
        ({0: Ended(1), 1: Ended(-15)}, "1 7", (1, 7)),
        ({0: Ended(1), 1: Ended(-9)}, "0 1", (1, -9)),
        ({0: Ended(1), 1: Ended(-9, timestamp=130)}, "0 1", (0, 1)),
        ({0: Ended(1), 1: Ended(-11)}, "0 1", (1, -11)),
        ({0: Ended(1), 1: Ended(-6)}, f"0 1 {LOST_PEER}", (1, -6)),
        ({0: Ended(1), 1: Ended(-6)}, "0 1 ValueError", (0, 1)),
        ({0: Ended(3), 1: Ended(1)}, f"1 1 {LOST_PEER}", (0, 3)),
        ({0: Ended(3), 1: Ended(1)}, "1 1 ValueError", (1, 1)),
        ({0: Ended(-15), 1: Ended(-6)}, f"1 1 {LOST_PEER}", (1, 1)),
        ({0: Ended(1, timestamp=101), 1: Ended(2, timestamp=100)}, None, (1, 2)),
    ],
    ids=str,
)
def test_first_failure(failures: dict[int, Ended], mark: str | None, first: tuple[int, int], tmp_path: Path) -> None:
    """A rank that died silently comes first, then a rank that left its mark, last one that torchrun stopped.

    A mark that only reports a lost peer ranks below a rank that aborted.
    """
    if mark:
        attempt = tmp_path / "run_x" / "attempt_0"
        attempt.mkdir(parents=True)
        (attempt / FIRST_FAILURE).write_text(mark)
    found = find_first_failure(failures, tmp_path)
    assert (found.rank, found.exitcode) == first


def test_a_rank_that_somebody_ended_while_others_waited(tmp_path: Path) -> None:
    """SIGTERM is also the launcher's own signal. The states before the launcher sent any decide."""
    attempt = tmp_path / "run_x" / "attempt_0"
    attempt.mkdir(parents=True)
    (attempt / FIRST_FAILURE).write_text(f"1 1 {LOST_PEER} 5")
    failures = {0: Ended(-15), 1: Ended(1)}
    assert find_first_failure(failures, tmp_path).rank == 1
    assert find_first_failure(failures, tmp_path, {0: TERMINATED}).exitcode == -15
    both = {0: Ended(-15), 1: Ended(-15)}
    assert find_first_failure(both, tmp_path / "none", {1: TERMINATED}).rank == 1
    assert describe_failure(FirstFailure(0, -40)).startswith("rank 0 was ended by signal 40, on ")


def test_ranks_with_the_same_error_are_named_once(tmp_path: Path) -> None:
    """They are listed briefly next to the first one. Without any, the report omits the line."""
    attempt = tmp_path / "run_x" / "attempt_0"
    attempt.mkdir(parents=True)
    (attempt / FIRST_FAILURE).write_text("1 2 ConfigError 123")
    for rank in (10, 0, 1, 2, 3, 4):
        (attempt / f"{FAILURE_OF}.{rank}").write_text("456" if rank == 4 else "123")
    first = find_first_failure({rank: Ended(2) for rank in (0, 1, 2, 3, 4, 10)}, tmp_path)
    assert (first.rank, first.exitcode, first.kind) == (1, 2, "ConfigError")
    said = describe_failure(first)
    assert "its output is above. Ranks 0, 2-3, 10 failed with the same error. All workers" in said
    assert "same error" not in describe_failure(FirstFailure(1, 2))


class Seen(MemoryWatch):
    """Memory as the watcher might have seen it."""

    def __init__(self, kills: int | None) -> None:
        super().__init__()
        self.available, self.resident, self._kills = 2**28, {41: 3 * 2**30, 42: 2**30}, kills

    @property
    def kills(self) -> int | None:
        return self._kills


def test_sigkill_is_explained_as_host_memory() -> None:
    """-9 names CPU memory, this machine's size, and how to reduce the use. Other ends do not."""
    text = describe_failure(FirstFailure(2, -9))
    assert f"rank 2 was ended by signal 9 (SIGKILL), on {socket.gethostname()}" in text
    assert "nearly always the kernel, because CPU memory ran out" in text
    assert "GiB" in text
    assert "CPU memory" not in describe_failure(FirstFailure(2, -11))
    assert "exit code 3" in describe_failure(FirstFailure(2, 3))


@pytest.mark.parametrize(
    ("kills", "said", "unsaid"),
    [
        (1, "the kernel counts 1 more such kills", "another process"),
        (0, "another process, a person", "fewer processes per machine"),
    ],
)
def test_what_the_kernel_counted_decides(kills: int, said: str, unsaid: str) -> None:
    """The kernel's counter separates out of memory from a `kill -9`.

    The ranks' shares are listed, the largest first.
    """
    text = describe_failure(FirstFailure(2, -9), memory=Seen(kills), processes={2: 42, 5: 41, 6: 43})
    assert said in text
    assert unsaid not in text
    assert "0.25 GiB was available; rank 5 had 3 GiB; rank 2 had 1 GiB." in text


@pytest.mark.parametrize(
    ("failure", "part"),
    [
        (FirstFailure(0, -7), "--shm-size"),
        (FirstFailure(0, -11), "the Python lines where it happened"),
        (FirstFailure(0, -6), "time-out"),
        (FirstFailure(0, -6), "add the loss of an unused branch times 0"),
        (FirstFailure(0, -4), "torch_extensions"),
        (FirstFailure(0, 137), "CPU memory"),
        (FirstFailure(0, 1, "OutOfMemoryError"), "gradient_accumulation_steps"),
        (FirstFailure(0, 1, LOST_PEER), "cannot be reached any more"),
    ],
    ids=str,
)
def test_what_an_end_means(failure: FirstFailure, part: str) -> None:
    """Signals, the exit code of a killed child, and a full GPU each have a sentence with the fix."""
    assert part in describe_failure(failure)


def test_ranks_that_could_not_run() -> None:
    """A stopped rank is named with the failed rank that it waited for. Several machines are distinguished."""
    found = {3: f"{STOPPED} by a signal", 4: HAD_ENDED}
    assert ["rank 3 did not run" in line for line in describe_idle(found, FirstFailure(0, 1))] == [True]
    _, line = describe_idle(found, FirstFailure(0, 1, LOST_PEER))
    assert "rank 4 did not run at that time: it had ended, with exit code 0." in line
    assert f"rank 0 of those on {socket.gethostname()} was ended by" in describe_failure(
        FirstFailure(0, -9), machines=2
    )


STACK = """Current thread 0x00007f10 (most recent call first):
  File "{stdlib}/threading.py", line 5 in wait
  File "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 7 in forward
  File "/home/me/train.py", line 85 in main
  File "/home/me/train.py", line 99 in <module>
"""


def test_where_a_rank_was_that_others_waited_for() -> None:
    """The report has the user's innermost line. It leaves out ranks that wait themselves or left nothing."""
    stack = STACK.format(stdlib=sysconfig.get_path("stdlib"))
    assert running_at(stack) == "was still running at that time, at train.py:85, in main"
    waits = f'  File "{Path(torch.__file__).parent}/distributed/distributed_c10d.py", line 3 in barrier\n'
    alike = waits.replace(str(Path(torch.__file__).parent), "/home/me/torch")  # a script's own folder
    head, frames = stack.split("\n", 1)
    assert running_at(f"{head}\n{waits}{frames}") == ""
    assert "at distributed_c10d.py:3" in running_at(f"{head}\n{alike}{frames}")
    assert running_at("") == ""
    assert running_at("".join(line for line in stack.splitlines(keepends=True) if "/home/me" not in line)) == ""
    many = {rank: running_at(stack) for rank in range(1, 8)}
    first = FirstFailure(0, 1, LOST_PEER)
    lines = describe_failure(first, idle=many).splitlines()
    assert lines[0].startswith("rank 0 waited for another rank without success, and failed with exit code 1, on ")
    assert lines[1] == "rank 1 was still running at that time, at train.py:85, in main."
    assert lines[-1] == "and 3 more ranks"
    assert "which has failed, hangs" in describe_failure(first)


def test_memory_is_watched() -> None:
    """Available memory and each child's use are seen within seconds. No process was killed for memory."""
    child = subprocess.Popen([sys.executable, "-c", "import time; a = bytearray(2**26); time.sleep(60)"])
    try:
        with MemoryWatch() as memory:
            deadline = time.monotonic() + 20
            while memory.resident.get(child.pid, 0) < 2**26 and time.monotonic() < deadline:
                time.sleep(0.05)
        assert 2**26 < memory.resident[child.pid] < 2**30
        assert memory.available is not None
        assert 0 < memory.available < 2**50
        assert memory.kills == 0
    finally:
        child.kill()
        child.wait()


def test_the_largest_processes() -> None:
    """The report of a kill lists the largest users of memory by size, name and id."""
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; a = bytearray(2**29); print(flush=True); sys.stdin.readline()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        found = largest_processes(10**6)
        assert [size for size, _, _ in found] == sorted((size for size, _, _ in found), reverse=True)
        (size, name) = next((size, name) for size, pid, name in found if pid == child.pid)
        assert 2**29 < size < 2**30
        assert name.startswith("python")
        size = largest_processes(1)[0][0]
        told = describe_failure(FirstFailure(0, -9))
        assert "The largest processes that are still running: " in told
        assert " has 0.5 GiB" in told or size > 2**29
    finally:
        child.communicate()


def test_shell_codes() -> None:
    """Signals become 128 + n, codes stay."""
    assert [shell_code(code) for code in (0, 3, -9)] == [0, 3, 137]
