"""How workers end: within seconds when one has failed, in their own time at SIGTERM; what they started ends too."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from zero_plugin.strategies.deepspeed.build_lock import RunningBuilds

__all__ = ["Ended", "end_copies_soon", "end_workers_so"]

_AFTER_FAILURE_S: Final = 5  # what a failed run's other workers have; torch's own is 30
_LOOK_S: Final = 0.05


@dataclass(slots=True)
class Ended:
    """A worker that has failed.

    Attributes:
        exitcode: of the process; negative: the signal that ended it.
        timestamp: when it was found, in whole seconds.
        pid: its process id.
    """

    exitcode: int
    timestamp: int
    pid: int


@contextmanager
def end_workers_so(grace_s: float, on_failure: Callable[[Mapping[int, Ended]], None]) -> Iterator[dict[int, str]]:
    """While it is entered, torchrun ends its workers in two ways, in place of its one.

    After a failure of one, the others get SIGTERM, and SIGKILL some seconds later. When the launcher gets a signal, the
    worker processes get it, and SIGKILL after `grace_s`; what they have started themselves (processes that load data)
    gets nothing meanwhile, so that a worker that saves a checkpoint then still has its data. A compiler that builds an
    op for them ends with them, and the build's lock is removed.

    Args:
        grace_s: see above.
        on_failure: is called after a failure, when no worker is left, with those that had failed by themselves.

    Yields:
        By rank, how a worker was found that could not run when another failed; filled while it is entered.
    """
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

    idle: dict[int, str] = {}
    close = SubprocessContext.close

    def end(workers: Any, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:  # noqa: ARG001
        processes = {int(workers.envs[k]["RANK"]): handler.proc for k, handler in workers.subprocess_handlers.items()}
        alive = [process for process in processes.values() if process.poll() is None]
        failed: dict[int, Ended] = {}
        builds = RunningBuilds()
        builds.look([process.pid for process in alive])
        if death_sig is None:
            codes = {rank: process.poll() for rank, process in processes.items()}
            idle.clear()
            idle.update({k: why for k, code in codes.items() if code is None and (why := _why_idle(processes[k].pid))})
            now = int(time.time())
            failed = {rank: Ended(code, now, processes[rank].pid) for rank, code in codes.items() if code}
            close(workers, None, _AFTER_FAILURE_S)
        else:
            for process in alive:
                process.send_signal(death_sig)
            deadline = time.monotonic() + grace_s
            while any(process.poll() is None for process in alive) and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
            builds.look([process.pid for process in alive if process.poll() is None])
            close(workers, signal.SIGKILL, _AFTER_FAILURE_S)
        # What processes that have ended well left running was meant to stay.
        for process in processes.values() if death_sig is None else alive:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # each worker leads a group of its own
        builds.end()
        if failed:
            on_failure(failed)

    SubprocessContext.close = end  # type: ignore[method-assign, assignment]
    try:
        yield idle
    finally:
        SubprocessContext.close = close  # type: ignore[method-assign]


@contextmanager
def end_copies_soon() -> Iterator[None]:
    """While it is entered, what torchrun has forked off a notebook ends as soon after a failure as other workers do."""
    from torch.multiprocessing.spawn import ProcessContext

    wait = ProcessContext._join_procs_with_timeout

    def wait_less(copies: ProcessContext, timeout: float) -> None:
        wait(copies, min(timeout, _AFTER_FAILURE_S))

    ProcessContext._join_procs_with_timeout = wait_less  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ProcessContext._join_procs_with_timeout = wait  # type: ignore[method-assign]


def _why_idle(pid: int) -> str:
    """What keeps a process from running, by the kernel's word; "" for nothing."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
    return {"T": "stopped by a signal (SIGSTOP, Ctrl-Z)", "t": "stopped by a debugger"}.get(state, "")
