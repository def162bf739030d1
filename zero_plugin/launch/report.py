"""After a failed run: which rank failed first, and what its exit means."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from zero_plugin.launch.machine import host_memory_bytes
from zero_plugin.launch.worker import FIRST_FAILURE

__all__ = ["Failure", "describe_failure", "find_first_failure", "shell_code"]

# A process ended by these dies without a word, and its peers then fail for want of it.
_SUDDEN = {-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE}
_SAME_MOMENT_S = 5  # longer after the first failure, a SIGKILL is the launcher's own


class Failure(Protocol):
    """What is read of torchrun's record of a failed worker; `timestamp` is in whole seconds."""

    exitcode: int
    timestamp: int
    pid: int


def find_first_failure(failures: Mapping[int, Failure], folder: Path) -> tuple[int, int]:
    """The rank whose failure caused the others, and its exit code (negative: the signal that ended it).

    Args:
        failures: by rank, of this machine.
        folder: where torchrun kept the error files; the first rank to fail in Python left its mark there.
    """
    earliest = min(failure.timestamp for failure in failures.values())
    for rank, failure in failures.items():
        if failure.exitcode in _SUDDEN and failure.timestamp - earliest <= _SAME_MOMENT_S:
            return rank, failure.exitcode
    marks = sorted(folder.glob(f"*/attempt_*/{FIRST_FAILURE}"), key=lambda mark: mark.stat().st_mtime_ns)
    if marks:
        # The mark, not the exit code: torchrun may have stopped that rank while it was still on its way out.
        marked, code = map(int, marks[-1].read_text().split())
        if marked in failures:
            return marked, code
    stopped = {-signal.SIGTERM, -signal.SIGKILL}
    rank, failure = min(failures.items(), key=lambda item: (item[1].exitcode in stopped, item[1].timestamp, item[0]))
    return rank, failure.exitcode


def describe_failure(rank: int, exitcode: int) -> str:
    """A few lines for people: who failed first, how, and for SIGKILL the likely cause with this machine's memory."""
    if exitcode > 0:
        return f"rank {rank} failed first, with exit code {exitcode}; its output is above. All workers are stopped."
    text = f"rank {rank} was ended by signal {-exitcode} ({signal.Signals(-exitcode).name}). All workers are stopped."
    if -exitcode != signal.SIGKILL:
        return text
    memory = host_memory_bytes()
    size = "" if memory is None else f" ({memory / 2**30:.1f} GiB here, for all processes together)"
    return (
        f"{text}\n"
        f"On Linux that is nearly always the kernel, because host memory ran out{size}; `dmesg` tells.\n"
        "What lowers it: fewer processes per machine, offload to NVMe in place of the CPU, fewer data loader workers,\n"
        "`pin_memory: false` in the offload sections. Errors that other ranks printed only follow from this one."
    )


def shell_code(exitcode: int) -> int:
    """A worker's exit code as a shell shows it: 128 + n for signal n."""
    return 128 - exitcode if exitcode < 0 else exitcode
