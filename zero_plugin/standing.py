"""Where a process stands among its collective calls, as it tells the others."""

from __future__ import annotations

import json
import sys
import sysconfig
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

__all__ = ["Standing", "issued_operations", "script_line"]


@dataclass(frozen=True, slots=True)
class Standing:
    """Where one process stands.

    Attributes:
        answers: number of the question that this answers; an older answer says nothing about now.
        calls: collective calls entered so far.
        call: name of the last one entered, "" for none.
        issued: operations that it has given to the process groups of all processes so far.
        line: where its script is, `file:line`.
        gone: whether the process has ended.
        failed: whether it ended with an error.
    """

    answers: int = 0
    calls: int = 0
    call: str = ""
    issued: int = 0
    line: str = ""
    gone: bool = False
    failed: bool = False

    def dump(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: bytes) -> Standing:
        """From `dump`'s text."""
        return cls(**json.loads(text))

    @property
    def last_call(self) -> str:
        """The last call, for sentences."""
        return f"{self.call}()" if self.call else "none"


def issued_operations() -> int:
    """Operations that this process has given to the groups that all processes are in."""
    world = dist.get_world_size()
    return sum(_issued_to(group) for group in list(c10d._world.pg_map) if group.size() == world)


def _issued_to(group: Any) -> int:
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:  # of several backends, each counts its own
        served = {id(b): b for b in (group._get_backend(device) for device in group._device_types)}
        return sum(int(backend._get_sequence_number_for_group()) for backend in served.values())


# Frames of these folders are not the script's: this package, torch, whatever else is installed, and Python itself.
_LIBRARIES = (
    *(f"{Path(place).resolve().parent}/" for place in (__file__, torch.__file__)),
    *(f"{sysconfig.get_paths()[name]}/" for name in ("stdlib", "purelib", "platlib")),
    "<",
)


def script_line(thread: int) -> str:
    """`file:line` of the script in a thread: its innermost frame that is in no library."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_LIBRARIES):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "its end"
