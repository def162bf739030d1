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


def find_first_failure(failures: Mapping[int, Failure], folder: Path) -> int:
    """The rank whose failure caused the others.

    Args:
        failures: by rank, of this machine.
        folder: where torchrun kept the error files; the first rank to raise left a mark there.
    """
    earliest = min(failure.timestamp for failure in failures.values())
    for rank, failure in failures.items():
        if failure.exitcode in _SUDDEN and failure.timestamp - earliest <= _SAME_MOMENT_S:
            return rank
    marks = sorted(folder.glob(f"*/attempt_*/{FIRST_FAILURE}"), key=lambda mark: mark.stat().st_mtime_ns)
    if marks and (rank := int(marks[-1].read_text() or -1)) in failures:
        return rank
    ended_by_launcher = {-signal.SIGTERM, -signal.SIGKILL}
    return min(
        failures, key=lambda rank: (failures[rank].exitcode in ended_by_launcher, failures[rank].timestamp, rank)
    )


def describe_failure(rank: int, failures: Mapping[int, Failure]) -> str:
    """A few lines for people: who failed first, how, and for SIGKILL the likely cause with this machine's memory."""
    code = failures[rank].exitcode
    if code > 0:
        return f"rank {rank} failed first, with exit code {code}; what it printed is above. All workers were stopped."
    name = signal.Signals(-code).name
    text = f"rank {rank} was ended by signal {-code} ({name}); all workers were stopped."
    if -code != signal.SIGKILL:
        return text
    memory = host_memory_bytes()
    size = "" if memory is None else f" ({memory / 2**30:.1f} GiB here, for all processes together)"
    return (
        f"{text}\n"
        f"On Linux that is nearly always the kernel, because host memory ran out{size}; `dmesg` names the process.\n"
        "What lowers it: fewer processes per machine, offload to NVMe in place of the CPU, fewer data loader workers,\n"
        "`pin_memory: false` in the offload sections. Errors that other ranks printed only follow from this one."
    )


def shell_code(exitcode: int) -> int:
    """A worker's exit code as a shell shows it: 128 + n for signal n."""
    return 128 - exitcode if exitcode < 0 else exitcode
