"""The progress that each rank publishes in the store of the process group, for the collective check."""

from __future__ import annotations

import functools
import json
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zero_plugin.machine.hardware import process_stat


@dataclass(slots=True)
class RankProgress:
    """The published progress of one process. Its statements on calls, passes and the end of the process stay true.

    Attributes:
        beat: the number of publications. If it does not change, the other values are out of date.
        calls: the number of collective calls that the process has entered.
        call: the name of the last entered call; "" for none.
        left: the number of collective calls that the process has left.
        passes: the number of parts of the training that need all processes, entered since the last call.
        line: the current line of the script, as `file:line`.
        since: the seconds spent in that line.
        busy: the import, compilation or save in progress there; "" for none.
        quiet: the seconds since the last import, compilation or save.
        machine: the machine on which `pid` is valid.
        pid: the process id.
        ended: whether the process has ended together with all other processes.
        gone: whether the process has ended without the others.
        failed: whether the process has ended with an error.
        end: what the script did before end_training(), as ", after …"; "" if the script called it directly.
    """

    beat: int = 0
    calls: int = 0
    call: str = ""
    left: int = 0
    passes: int = 0
    line: str = ""
    since: float = 0.0
    busy: str = ""
    quiet: float = float("inf")
    machine: str = ""
    pid: int = 0
    ended: bool = False
    gone: bool = False
    failed: bool = False
    end: str = ""

    @property
    def last_call(self) -> str:
        """The last call, as text for messages."""
        return f"{self.call}()" if self.call else "none"

    @property
    def is_gone(self) -> bool:
        """Whether the process certainly makes no more calls, although the run has not ended for all processes."""
        return self.gone or (not self.ended and self.process_state == "gone")

    @property
    def process_state(self) -> str:
        """`gone`, `stopped` or `alive`; "" if not known for sure, for example on another machine."""
        if not self.pid or self.machine != _machine():
            return ""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return "gone"
        except OSError:  # the process belongs to another user
            return "alive"
        letter = (process_stat(self.pid) or [""])[0]
        return {"Z": "gone", "X": "gone", "T": "stopped", "t": "stopped"}.get(letter, "alive")


def begin_progress() -> RankProgress:
    """Return this process's progress before its first call."""
    return RankProgress(machine=_machine(), pid=os.getpid())


def publish(store: Any, rank: int, progress: RankProgress) -> None:
    """Publish this process's progress in the store for the other processes."""
    store.set(f"at/{rank}", json.dumps(asdict(progress)))


def read_progress(store: Any, ranks: Sequence[int]) -> dict[int, RankProgress]:
    """Read the published progress of other processes. A process that has not published has the default progress."""
    keys = [f"at/{rank}" for rank in ranks]
    if store.check(keys):
        found = store.multi_get(keys)
    else:  # `multi_get` would wait for missing keys
        found = [store.get(key) if store.check([key]) else b"{}" for key in keys]
    return {rank: RankProgress(**json.loads(text)) for rank, text in zip(ranks, found, strict=True)}


@functools.cache
def _machine() -> str:
    """Return a name for this process-id namespace. Processes with the same name can see each other's ids."""
    parts = [socket.gethostname()]
    with suppress(OSError):  # not Linux
        parts += [
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            str(Path("/proc/self/ns/pid").readlink()),
        ]
    return " ".join(parts)
