"""The report on a failed run: which rank failed first, where and how, what that means and what to do."""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import signal
import socket
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from zero_plugin.config.amounts import show_bytes
from zero_plugin.config.run_files import OutOfMemoryReport
from zero_plugin.launch.worker import FAILURE_OF, FIRST_FAILURE, LOST_PEER
from zero_plugin.machine.hardware import MemoryWatch, largest_processes, number_ranges, total_cpu_memory

# These signals end a process without a message. The other ranks then fail because that process has ended.
_SUDDEN: Final = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
# 128 + n: signal n ended a child of the process.
_SUDDEN_CODES: Final = {code for number in _SUDDEN for code in (-number, 128 + number)}
_ABORTED: Final = (-signal.SIGABRT, 128 + signal.SIGABRT)
TERMINATED: Final = "was ended by signal 15 (SIGTERM)"  # before the launcher sent one
STOPPED: Final = "did not run at that time: it was stopped"
_MOST_IDLE: Final = 4
_ENDED: Final = (-signal.SIGTERM, -signal.SIGKILL)  # ended by the launcher, except for the sudden ends
_SAME_MOMENT_S: Final = 2  # later than this after the first failure, a SIGKILL is the launcher's own
HAD_ENDED: Final = "did not run at that time: it had ended, with exit code 0"
_LIBRARIES: Final = (
    "<frozen ",
    "/site-packages/",
    "/dist-packages/",
    sysconfig.get_path("stdlib"),
    str(Path(__file__).parents[1]),
)
_FRAME: Final = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_KILLED_IN_SHELL: Final = 128 + signal.SIGKILL
_WORTH_NAMING: Final = 2**28  # bytes: smaller processes are not listed
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - not written here
_NATIVE: Final = (
    "An error in compiled code (torch, an extension, a driver), not in Python; the Python lines where it happened are "
    "above."
)
_MEANINGS: Final[Mapping[int, str]] = {
    signal.SIGSEGV: _NATIVE,
    signal.SIGFPE: _NATIVE,
    signal.SIGABRT: "The process ended itself: compiled code found an error, which it printed above.\n"
    "* DeepSpeed does so when the disk that it offloads to is full (`file bytes`).\n"
    "* NCCL does so when an operation waits longer than the process group's time-out.\n"
    "* gloo does so when processes call a collective with tensors of different sizes\n"
    "  (`op.preamble.length <= op.nbytes`).\n"
    "The last two happen when processes take different branches of a model at ZeRO stage 2 or 3. Take the same branch\n"
    "on every rank, add the loss of an unused branch times 0, or use stage 1.",
    signal.SIGILL: "The processor does not know an instruction: some code was compiled for another processor. Delete "
    "the built extensions (~/.cache/torch_extensions), and build them on this kind of machine.",
}
_GPU_MEMORY: Final = (
    "GPU memory ran out. To reduce its use, the cheapest first: a smaller batch per process with as many more\n"
    "gradient_accumulation_steps; activation checkpointing; a higher zero_stage; offload_optimizer_device: cpu;\n"
    "at stage 3 offload_param_device: cpu."
)
_NO_ANSWER: Final = (
    "The rank waited for another process, which has failed, hangs, or cannot be reached any more. Look at the output\n"
    "of the launchers of other machines, and at the network between the machines."
)
_LESS_CPU_MEMORY: Final = (
    "To reduce its use: fewer processes per machine, offload to NVMe instead of the CPU, fewer data loader workers,\n"
    "`pin_memory: false` in the offload sections. Errors that other ranks printed are consequences of this one."
)


@dataclass(frozen=True, slots=True)
class FirstFailure:
    """The failure that caused the others.

    Attributes:
        rank: the rank among all processes.
        exitcode: the process's exit code; negative: the signal that ended the process.
        kind: class of the exception, "" without one.
        also: the ranks that failed later with the same exception, and have not printed it again.
    """

    rank: int
    exitcode: int
    kind: str = ""
    also: tuple[int, ...] = ()


def find_first_failure(
    failures: Mapping[int, Any], folder: Path, idle: Mapping[int, str] | None = None
) -> FirstFailure:
    """Find the failure on this machine that caused the others.

    Args:
        failures: by rank, torchrun's record of each failed worker of this machine (`ProcessFailure`).
        folder: torchrun's folder of error files. The first rank to fail in Python left a mark there.
        idle: activity of ranks that others may have waited for.
    """
    terminated = {rank for rank, what in (idle or {}).items() if what == TERMINATED}
    earliest = min(failure.timestamp for failure in failures.values())
    for rank, failure in failures.items():
        if failure.exitcode in _SUDDEN_CODES and failure.timestamp - earliest <= _SAME_MOMENT_S:
            return FirstFailure(rank, failure.exitcode)
    marks = sorted(folder.glob(f"*/attempt_*/{FIRST_FAILURE}"), key=lambda mark: mark.stat().st_mtime_ns)
    if marks:
        # The mark, not the exit code: torchrun may have stopped that rank during its own exit.
        marked, code, *details = marks[-1].read_text().split()
        kind = details[0] if details else ""
        of_rank = {int(file.suffix[1:]): file.read_text() for file in marks[-1].parent.glob(f"{FAILURE_OF}.*")}
        if kind == LOST_PEER:  # the cause is a rank that ended without a mark: by an abort, or by its own exit
            for rank, failure in failures.items():
                if rank in terminated or (rank not in {int(marked), *of_rank} and failure.exitcode not in _ENDED):
                    return FirstFailure(rank, failure.exitcode)
        # Replicas on a TPU have ranks of their own within the single worker, which ends with their code.
        if int(marked) in failures or [failure.exitcode for failure in failures.values()] == [int(code)]:
            digest = details[-1] if details else ""
            also = sorted(rank for rank, of in of_rank.items() if digest and of == digest and rank != int(marked))
            return FirstFailure(int(marked), int(code), kind, tuple(also))

    def turn(rank: int) -> tuple[bool, int, int]:
        failure = failures[rank]
        return failure.exitcode in _ENDED and rank not in terminated, failure.timestamp, rank

    rank = min(failures, key=turn)
    failure = failures[rank]
    return FirstFailure(rank, failure.exitcode)


def describe_failure(
    first: FirstFailure,
    *,
    machines: int = 1,
    memory: MemoryWatch | None = None,
    processes: Mapping[int, int] | None = None,
    out_of_memory: OutOfMemoryReport | None = None,
    idle: Mapping[int, str] | None = None,
) -> str:
    """Describe in a few lines which rank failed first, where and how, what that means and what to do.

    Args:
        first: the failure.
        machines: number of machines. With several, another machine may have failed earlier.
        memory: measurements of CPU memory while the workers ran.
        processes: the process id of each failed rank, to find its share of the memory.
        out_of_memory: the report of a worker that ran out of memory.
        idle: activity of ranks that others may have waited for; see `describe_idle`.
    """
    where = f", on {socket.gethostname()}" if machines == 1 else ""
    output = "" if first.exitcode < 0 or first.kind == KeyboardInterrupt.__name__ else "; its output is above"
    waited_for = describe_idle(idle or {}, first)
    same = f" {_ranks(first.also)} failed with the same error." if first.also else ""
    lines = [f"{describe_end(first, machines)}{where}{output}.{same} All workers are stopped."]
    if out_of_memory is not None:
        lines += [out_of_memory.headline, out_of_memory.advice]
        if out_of_memory.cut:
            lines.append("With --max_restarts 1 on every machine the run starts again with the smaller micro-batch.")
    elif first.kind == "OutOfMemoryError":
        lines.append(_GPU_MEMORY)
    elif first.kind == LOST_PEER and not waited_for:
        lines.append(_NO_ANSWER)
    elif first.exitcode in (-signal.SIGKILL, _KILLED_IN_SHELL):
        lines.append(_explain_kill(memory, processes or {}))
    elif first.exitcode == -signal.SIGBUS:
        lines.append(_explain_bus_error())
    elif -first.exitcode in _MEANINGS:
        lines.append(_MEANINGS[-first.exitcode])
    return "\n".join([*lines, *waited_for])


def describe_end(first: FirstFailure, machines: int = 1) -> str:
    """Describe the first failure in half a sentence. With several machines, each one only knows its own ranks."""
    among = "" if machines == 1 else f" of those on {socket.gethostname()}"
    if first.kind == LOST_PEER:
        return (
            f"rank {first.rank}{among} waited for another rank without success, and failed with exit code "
            f"{first.exitcode}"
        )
    if first.kind == KeyboardInterrupt.__name__:
        return f"rank {first.rank}{among} was interrupted (SIGINT)"
    if first.exitcode >= 0:
        return f"rank {first.rank} failed first{among}, with exit code {first.exitcode}"
    return f"rank {first.rank}{among} was ended by {_signal(-first.exitcode)}"


def _signal(number: int) -> str:
    known = {int(one): f" ({one.name})" for one in signal.Signals}  # real-time signals have no names
    return f"signal {number}{known.get(number, '')}"


def _ranks(ranks: tuple[int, ...]) -> str:
    """Return ranks as prose: `Rank 1`, `Ranks 0, 2-5`."""
    shown = number_ranges(ranks).replace(",", ", ")
    return f"Rank{'s' if len(ranks) > 1 else ''} {shown}"


def describe_idle(idle: Mapping[int, str], first: FirstFailure) -> list[str]:
    """Return a line for each of a few ranks that others may have waited for at the failure.

    A rank that had ended successfully, or was running, matters only if the first rank to fail was waiting.
    """
    waited = first.kind == LOST_PEER or first.exitcode in _ABORTED
    lines = [f"rank {rank} {what}." for rank, what in sorted(idle.items()) if waited or what.startswith(STOPPED)]
    more = [f"and {len(lines) - _MOST_IDLE} more ranks"] if len(lines) > _MOST_IDLE else []
    return [*lines[:_MOST_IDLE], *more]


@functools.cache
def _waiting_places() -> tuple[str, ...]:
    """Return path prefixes of the files that wait for other ranks. A process with its innermost frame there waits."""
    own = Path(__file__).parents[1]
    found = {"zero_plugin": own}
    for name in ("torch", "deepspeed"):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            found[name] = Path(spec.origin).parent
    parts = ("torch/distributed/", "torch/autograd/graph.py", "deepspeed/comm/", "zero_plugin/distributed/")
    return tuple(str(found[name] / rest) for name, _, rest in (part.partition("/") for part in parts) if name in found)


def running_at(stack: str) -> str:
    """Return where in the script a rank is running, from its stack; "" if the rank itself waits for others.

    Args:
        stack: in the format of Python's faulthandler, the innermost frame first.
    """
    frames = _FRAME.findall(stack)
    users = [one for one in frames if not any(part in one[0] for part in _LIBRARIES)]
    if not users or frames[0][0].startswith(_waiting_places()):
        return ""
    file, line, function = users[0]
    return f"was still running at that time, at {Path(file).name}:{line}, in {function}"


def shell_code(exitcode: int) -> int:
    """Convert a worker's exit code to a shell's: 128 + n for signal n."""
    return 128 - exitcode if exitcode < 0 else exitcode


def _explain_kill(memory: MemoryWatch | None, processes: Mapping[int, int]) -> str:
    total = f" ({show_bytes(total_cpu_memory())} here, for all processes together)"
    kills = None if memory is None else memory.kills
    if kills:
        lines = [f"The kernel did it, because CPU memory ran out{total}: the kernel counts {kills} more such kills."]
    elif kills == 0:
        lines = [f"Not because CPU memory ran out{total}: the kernel counts no such kill. The signal came from"]
        lines.append("another process, a person, a scheduler, or a watchdog.")
    else:
        lines = [f"On Linux that is nearly always the kernel, because CPU memory ran out{total}. Check with `dmesg`."]
    if memory is not None and memory.available is not None:
        shares = sorted((-memory.resident.get(pid, 0), rank) for rank, pid in processes.items())
        largest = "".join(f"; rank {rank} had {show_bytes(-share)}" for share, rank in shares[:4] if share)
        lines.append(f"At the last measurement {show_bytes(memory.available)} was available{largest}.")
    others = [
        f"{name} ({pid}) has {show_bytes(size)}" for size, pid, name in largest_processes(3) if size >= _WORTH_NAMING
    ]
    if others and kills != 0:
        lines.append(f"The largest processes that are still running: {', '.join(others)}.")
    return "\n".join(lines if kills == 0 else [*lines, _LESS_CPU_MEMORY])


def _explain_bus_error() -> str:
    try:
        space = shutil.disk_usage(_SHARED_MEMORY)
    except OSError:
        room = ""
    else:
        room = f" ({show_bytes(space.free)} of {show_bytes(space.total)} are free now)"
    return (
        f"Nearly always {_SHARED_MEMORY} is full{room}: data loader workers and NCCL pass tensors there.\n"
        "Make it larger (docker run --shm-size=16g, or --ipc=host), or use fewer data loader workers. Otherwise a file "
        "that is mapped into memory was truncated."
    )
