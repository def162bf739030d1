"""What each rank publishes of its progress through collective calls, and the rule by which another one judges it."""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

import torch


@dataclass(slots=True)
class RankProgress:
    """Where one process is. What it publishes of calls and passes, and that it is gone, stays true for good.

    Attributes:
        beat: counts up with each time that it is published; one that stays says nothing about now.
        calls: collective calls entered so far.
        call: name of the last one entered, "" for none.
        left: collective calls left so far.
        passes: parts of the training that need all processes, entered since that call.
        line: where its script is, `file:line`.
        since: seconds that it is there.
        busy: what it imports, compiles or saves there, "" for nothing of these.
        quiet: seconds since it last did.
        machine: whose process ids `pid` is one of.
        pid: of the process.
        ended: whether it has come to its end with all others.
        gone: whether it ends without them.
        failed: whether it does so with an error.
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

    @property
    def last_call(self) -> str:
        """The last call, for sentences."""
        return f"{self.call}()" if self.call else "none"

    @property
    def is_gone(self) -> bool:
        """Whether it is sure that the process makes no more calls, and it has not come to a common end."""
        return self.gone or (not self.ended and self.process_state == "gone")

    @property
    def process_state(self) -> str:
        """`gone`, `stopped` or `alive`; "" where that cannot be known for sure, as on another machine."""
        if not self.pid or self.machine != _machine():
            return ""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return "gone"
        except OSError:  # of another user
            return "alive"
        with suppress(OSError):
            letter = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
            return {"Z": "gone", "X": "gone", "T": "stopped", "t": "stopped"}.get(letter, "alive")
        return "alive"


def begin_progress() -> RankProgress:
    """This process's, before its first call."""
    return RankProgress(machine=_machine(), pid=os.getpid())


def publish(store: Any, rank: int, progress: RankProgress) -> None:
    """Let the other processes see where this one is."""
    store.set(f"at/{rank}", json.dumps(asdict(progress)))


def read_progress(store: Any, ranks: Sequence[int]) -> dict[int, RankProgress]:
    """Where other processes are, as they have published it; one that has not is nowhere yet."""
    keys = [f"at/{rank}" for rank in ranks]
    if store.check(keys):
        found = store.multi_get(keys)
    else:  # it would wait for those that are missing
        found = [store.get(key) if store.check([key]) else b"{}" for key in keys]
    return {rank: RankProgress(**json.loads(text)) for rank, text in zip(ranks, found, strict=True)}


@functools.cache
def _machine() -> str:
    """Names what gives process ids: two processes of the same name see each other's."""
    parts = [socket.gethostname()]
    with suppress(OSError):  # not Linux
        parts += [
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            str(Path("/proc/self/ns/pid").readlink()),
        ]
    return " ".join(parts)


# Frames of these are not the script's: this package, torch, whatever else is installed, and Python itself.
_PACKAGE = f"{Path(__file__).resolve().parents[1]}/"
_TORCH = f"{Path(torch.__file__).resolve().parent}/"
_LIBRARIES = (_PACKAGE, _TORCH, *(f"{sysconfig.get_paths()[name]}/" for name in ("stdlib", "purelib", "platlib")), "<")
_INSTALLED = ("/site-packages/", "/dist-packages/")  # of the user, or of another environment that is on the path

# What runs for long and is no sign of a mistake, by the file, or its folder, that is on the stack as long as it does.
_BUSY = {
    "<frozen importlib._bootstrap>": "imports",
    f"{_TORCH}utils/cpp_extension.py": "compiles",
    f"{_TORCH}utils/file_baton.py": "waits for the build of",
    f"{_TORCH}_dynamo/convert_frame.py": "compiles",
    f"{_TORCH}_inductor/compile_fx.py": "compiles",
    f"{_TORCH}serialization.py": "saves or loads",
    f"{_PACKAGE}checkpoint/": "saves or loads",
    "/safetensors/": "saves or loads",
}


def script_line(thread: int) -> str:
    """`file:line` of the script in a thread: its innermost frame that is in no library."""
    return _line_of(next((frame for frame in _frames(thread) if not _is_library(frame)), None))


def _what_runs(thread: int) -> tuple[str, str]:
    """`script_line`, and what the script imports, compiles, or saves or loads there; "" for nothing of these."""
    done, name = "", ""
    script: FrameType | None = None
    for frame in _frames(thread):
        if not _is_library(frame):
            script = script or frame
            if done or frame.f_code.co_name != "<module>":
                break
            continue  # a module's own lines run as long as it is imported
        kind = next((kind for file, kind in _BUSY.items() if file in frame.f_code.co_filename), "")
        # A lock that is waited for is inside the build that it belongs to; else the outermost says most.
        if kind and not (done.startswith("waits") and kind == "compiles"):
            done, name = kind, ""
        if kind:
            name = _named_in(frame) or name
    return _line_of(script), f"{done} {name}".strip()


def _frames(thread: int) -> Iterator[FrameType]:
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_library(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith(_LIBRARIES) or any(folder in name for folder in _INSTALLED)


def _line_of(frame: FrameType | None) -> str:
    return "its end" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _named_in(frame: FrameType) -> str:
    """What a frame of an import or of a build is about, by its argument `name`."""
    if frame.f_code.co_name not in ("_find_and_load", "_jit_compile", "load"):
        return ""
    name = frame.f_locals.get("name")
    return name if isinstance(name, str) else ""


class ScriptView:
    """What this process' script does, looked at once in a tick.

    Args:
        script: the script's thread.
        builds: seconds of compiling after which it is logged; then after twice as long, and so on.
        progress: what is seen is written there.
    """

    def __init__(self, script: int, builds: float, progress: RankProgress) -> None:
        self._script = script
        self._builds = builds
        self._progress = progress
        self._built = 0.0  # seconds that it compiles
        self._warns_at = builds

    def look(self, awake: float, warn: Callable[[str], None]) -> None:
        """Look, `awake` seconds after the last time; warn of what is compiled, where it takes long."""
        line, busy = _what_runs(self._script)
        seen = self._progress
        seen.since = seen.since + awake if line == seen.line else 0.0
        seen.quiet = 0.0 if busy else seen.quiet + awake
        seen.beat, seen.line, seen.busy = seen.beat + 1, line, busy
        self._built = self._built + awake if busy.startswith("compiles ") else 0.0
        if not self._built:
            self._warns_at = self._builds
        elif self._built >= self._warns_at:
            self._warns_at *= 2
            warn(f"{busy}, for {self._built:.0f} s so far ({line}); other processes wait for it.")


_SHOWN: Final = 4  # late processes in a warning
_SILENT_S: Final = 5.0  # since when a process' silence is mentioned


class Call(NamedTuple):
    """One collective call, as its process entered it.

    Attributes:
        number: of collective calls, this one included.
        name: what messages call it.
        passes: that the process had begun since the call before.
    """

    number: int
    name: str
    passes: int


def find_mismatch(call: Call, others: Mapping[int, RankProgress]) -> str | None:
    """Who of `others` can never come to `call`, and what to do about it; None where each has come, or still may.

    One is gone, and had not come; or is in another of our collectives: its call of this number has another name, or
    before that call it has begun a pass that this process has not, and that it needs this process in.
    """
    for rank, progress in others.items():
        if progress.calls == call.number and progress.call != call.name:
            return _different(rank, progress)
        if progress.left < call.number and progress.is_gone:
            return _gone(call, rank, progress)
        if progress.calls == call.number - 1 and progress.passes > call.passes:
            return _elsewhere(call, rank, progress)
    return None


class Waiting:
    """How long this process has been in a call, and what it has seen of the others there.

    Args:
        call: the one.
        warns_at: quiet of another process, in seconds, at which it is named.
    """

    def __init__(self, call: Call, warns_at: float) -> None:
        self.call = call
        self.seconds = 0.0
        self.looks = 0
        self.warns_at = warns_at
        self._heard: dict[int, tuple[int, float]] = {}  # by rank: its last beat, and when that came

    def silence_of(self, rank: int, progress: RankProgress) -> float:
        """Seconds in which the process is known to have published nothing."""
        beat, heard = self._heard.get(rank, (-1, 0.0))
        if beat != progress.beat:
            heard = self.seconds
            self._heard[rank] = (progress.beat, heard)
        return self.seconds - heard


def describe_late(waiting: Waiting, others: Mapping[int, RankProgress]) -> tuple[str, float]:
    """Who has not come to the call, and where each is; and the longest quiet of one, without import, build or save."""
    late = {rank: progress for rank, progress in others.items() if progress.calls < waiting.call.number}
    silences = {rank: waiting.silence_of(rank, progress) for rank, progress in late.items()}
    places = [_whereabouts(rank, progress, silences[rank]) for rank, progress in late.items()]
    more = [f"and {len(places) - _SHOWN} more"] if len(places) > _SHOWN else []
    quiet = max((min(waiting.seconds, s.quiet + silences[rank]) for rank, s in late.items()), default=0.0)
    return "; ".join([*places[:_SHOWN], *more]), quiet


def describe_overdue(here: str, limit: float, late: str) -> str:
    """The error of a process that has waited for `limit` seconds."""
    return (
        f"{here} for {limit:.0f} s, the process group's time-out: {late or 'other processes have not come'}.\n"
        "Where a process may take that long, raise it: "
        "Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=…))])."
    )


def _whereabouts(rank: int, progress: RankProgress, silence: float) -> str:
    if not progress.pid:
        return f"process {rank} has not said yet where it is"
    where = f"process {rank} is at {progress.line} for {progress.since:.0f} s"
    state = progress.process_state
    if state == "stopped":
        where += " (its process is stopped)"
    elif silence > _SILENT_S:
        where += f" (silent for {silence:.0f} s{', though its process is alive' if state == 'alive' else ''})"
    elif progress.busy:
        where += f", where it {progress.busy}"
    return f"{where}; its last such call was {progress.last_call}"


def _different(rank: int, progress: RankProgress) -> str:
    line = "" if progress.gone else f" ({progress.line})"
    return (
        f"process {rank} is in {progress.call}(){line}.\n"
        "Both are collective: every process has to make the same calls in the same order."
    )


def _elsewhere(call: Call, rank: int, progress: RankProgress) -> str:
    fix = (
        "Every process has to take the same number of steps, and to come to the end."
        if call.name == "end_training"
        else f"{call.name}() is collective: call it on every process, not under "
        "`if accelerator.is_main_process:`. What one process alone may do, it does there by itself."
    )
    return f"process {rank} did not come: it went on, and waits for this process at {progress.line}.\n{fix}"


def _gone(call: Call, rank: int, progress: RankProgress) -> str:
    how = "failed" if progress.failed else "ended"
    return (
        f"process {rank} has {how}; its last such call was {progress.last_call}.\n"
        f"{call.name}() is collective: every process has to come to it."
    )
