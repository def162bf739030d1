"""Watches that all ranks come to the same collective calls, names who does not, and ends a run that cannot go on.

First what each rank publishes of its progress, then the rule by which another one judges it, then the watch itself.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from zero_plugin.distributed.joining import STORE_VISITS, has_agent_store
from zero_plugin.distributed.process_end import end_process, is_at_exit, run_in_threads
from zero_plugin.distributed.whereabouts import (
    NO_LINE,
    begins_loop,
    last_exit,
    long_operation,
    note_exits,
    running_functions,
    script_line,
)
from zero_plugin.errors import LoopError, of_lost_peer
from zero_plugin.machine.hardware import number_ranges, process_stat

_log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

# ---- what each rank publishes ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class RankProgress:
    """What one process publishes about its progress. What it says of calls and passes, and that it is gone, stays true.

    Attributes:
        beat: the number of times that it was published; if it does not change, the rest is out of date.
        calls: the number of collective calls that the process has entered.
        call: the name of the last of them, "" for none.
        left: the number of collective calls that it has left.
        passes: the number of parts of the training that need all processes, entered since the last call.
        line: the current line of its script, as `file:line`.
        since: the seconds that it has been in that line.
        busy: what it imports, compiles or saves there; "" for none of these.
        quiet: the seconds since it last imported, compiled or saved.
        machine: the machine on which `pid` is valid.
        pid: the process id.
        ended: whether it has ended together with all other processes.
        gone: whether it has ended without the others.
        failed: whether it has ended with an error.
        end: what its script did before end_training(), as ", after …"; "" if it called that itself.
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
        letter = (process_stat(self.pid) or [""])[0]
        return {"Z": "gone", "X": "gone", "T": "stopped", "t": "stopped"}.get(letter, "alive")


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


# ---- the rule --------------------------------------------------------------------------------------------------------

SAME_ORDER: Final = "Both calls are collective: every process has to make the same collective calls in the same order."
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


class Finding(NamedTuple):
    """A mistake or the end of another process, as a message.

    Attributes:
        text: for people.
        lost_peer: see `ZeroPluginError`.
    """

    text: str
    lost_peer: bool = False

    def error(self) -> LoopError:
        """The error that a script raises for it."""
        error = LoopError(self.text)
        error.lost_peer = self.lost_peer
        return error


def find_mismatch(call: Call, others: Mapping[int, RankProgress], *, in_loop: bool = False) -> Finding | None:
    """Who of `others` can never come to `call`, and what to do about it; None where each has come, or still may.

    One is gone, and had not come; or is in another of our collectives: its call of this number has another name, or
    before that call it has begun a pass that this process has not, and that it needs this process in.

    Args:
        call: of this process.
        others: by rank.
        in_loop: whether a loop over a prepared loader has made the call, and not the script.
    """
    # Who has failed says so, and may have failed because of one that ended without a word: that one is named first.
    for rank, progress in sorted(others.items(), key=lambda one: one[1].failed):
        if progress.calls == call.number and progress.call != call.name:
            line = "" if progress.gone else f" ({progress.line})"
            return Finding(f"process {rank} is in {progress.call}(){line}{progress.end}.\n{SAME_ORDER}")
        if progress.left < call.number and progress.is_gone:
            how = "failed" if progress.failed else "ended"
            seen = f" It was last seen at {progress.line}." if progress.line else ""
            return Finding(
                f"process {rank} has {how}; its last such call was {progress.last_call}.{seen}\n"
                f"{call.name}() is collective: every process has to come to it.",
                lost_peer=True,
            )
        if progress.calls == call.number - 1 and progress.passes > call.passes:
            goes_on = "still trains" if call.name == "end_training" else "continued"
            return Finding(
                f"process {rank} did not come: it {goes_on}, and needs this process at {progress.line}.\n"
                f"{_advise(call.name, in_loop=in_loop)}"
            )
    return None


def _advise(call: str, *, in_loop: bool) -> str:
    """Return what to do about a call to which not all processes come."""
    if call == "end_training":
        return "Every process has to take the same number of steps, and to call end_training()."
    if in_loop:
        return (
            f"{call}() is a part of the loop over a prepared loader, which is collective. Every process has to begin "
            "the same loops, and to take the same number of steps. To leave a loop by `break` on all of them, use "
            "accelerator.set_trigger() and check_trigger()."
        )
    return (
        f"{call}() is collective: call it on every process, not under `if accelerator.is_main_process:`. What only the "
        "main process has to do, it does by itself in there."
    )


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


def _ranks(ranks: Sequence[int]) -> str:
    """Processes, for the beginning of a sentence."""
    return f"process {ranks[0]}" if len(ranks) == 1 else f"processes {number_ranges(ranks)}"


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


# ---- the watch -------------------------------------------------------------------------------------------------------

_KNOWN: Final = 64  # processes of a run, up to which each knows all others' ids from the beginning
_ENDING_S: Final = 0.5  # between the end of a process' connections, by which others fail, and its own
_ANSWER_S: Final = 10.0  # for the store, which would never answer from behind a cut cable


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a process waits for the others, in seconds.

    Attributes:
        tick: between two times that the watching thread publishes where its process is.
        asks: inside one call, between two looks at where the others are.
        late: before a process that has not come is named; then after twice as long, and so on.
        builds: before a process warns that it compiles; then after twice as long, and so on.
    """

    tick: float = 1.0
    asks: float = 3.0
    late: float = 60.0
    builds: float = 10.0


class CollectiveCheck:
    """One process' part in the check that all make the same collective calls in the same order.

    A call costs a few microseconds: it is counted here, and nothing is sent. Once in a `tick` a thread writes to the
    store of the process group where its process is (`RankProgress`). So this is known of another one:

    * how many collective calls it has entered, and the name of the last;
    * how many passes it has begun since: parts of the training that need all processes (a backward that averages, a
      step of ZeRO, a forward that fetches partitioned weights);
    * the line of its script, and how long it is there; what it imports, compiles or saves, and when it last did;
    * that it is gone: it has published that at its end, or its process id is no more on this machine. On another
      one only what it has published counts. That it is silent never does.

    Where processes have been inside one call for long, one of them at a time looks at the others. One rule ends a run:
    this process is in its k-th call, and another one is gone without having come to it, or *is in another of our
    collectives*: its k-th call has another name, or before it has come to its k-th call it has begun a pass that this
    process has not, and that it needs this process in. What is found is looked at twice. Whatever else a process does
    (operations of torch's that are none of our calls, a download, a debugger), it is merely late. A late one is named
    in a warning, first when it has shown no import, no build and no save for `late` seconds, and the process group's
    own time-out decides.

    Time is counted in ticks that this process was awake for: one that is stopped and continued has not waited.

    In calls that are rare and long (`waits_for_all`) the processes first wait for each other in the store. There an
    error is a `LoopError` in the script. In any other call the script waits in a C++ operation that cannot be
    interrupted, so the error is printed, the calls of `call_before_end` are made, and the process exits with 1.

    Args:
        store: shared by all processes.
        rank: of this process.
        world_size: of all.
        patience: how long it waits.
        limit: seconds after which waiting in the store fails: the process group's own time-out.

    Attributes:
        has_ended: whether the process group has ended, and the check with it.
    """

    def __init__(self, store: Any, rank: int, world_size: int, patience: Patience, limit: float = float("inf")) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._patience = patience
        self._limit = limit
        self.has_ended = False
        self._progress = begin_progress()
        self._now: Call | None = None
        self._in_script = False  # whether the script can raise an error: it waits in the store
        self._error: Finding | None = None
        self._silent = False  # the store has not answered in time
        self._late = ""  # who has not come to the present call, as far as known
        self._script = threading.get_ident()
        self._compiled = 0.0  # seconds that the script compiles now
        self._warns_at = patience.builds
        self._stopping = threading.Event()
        self._others: dict[int, RankProgress] = {}  # as last read; their process ids hold when the store is gone
        # Now, not at the first tick: until a process publishes its id, no other one can notice its death.
        publish(store, rank, self._progress)
        self._thread = threading.Thread(target=self._watch, name="zero_plugin collective check", daemon=True)
        self._thread.start()

    def refuse_without_group(self, name: str) -> None:
        """Raise unless the call is a part of another one, which needs no process group."""
        if self._now is None:
            by = "end_training()" if self.has_ended else "this script, by torch.distributed.destroy_process_group(),"
            raise LoopError(
                f"{name}() needs the other processes, but {by} has ended the process group.\nCall {name}() before that."
            )

    def enter(self, name: str, *, waits_for_all: bool) -> bool:
        """Called when the script enters a collective call. Returns False inside another call, of which it is a part.

        Raises:
            LoopError: another process is in another call, is gone, or is too late for a call with `waits_for_all`.
        """
        if self._now is not None:
            return False
        progress, self._late = self._progress, ""
        passes, progress.passes = progress.passes, 0
        progress.calls, progress.call = progress.calls + 1, name
        progress.end = _describe_end(progress.line) if name == "end_training" else ""
        self._now = Call(progress.calls, name, passes)
        if waits_for_all:
            try:
                self._wait_for_all(f"met/{progress.calls}/{name}")
            except BaseException:
                self._now = None
                raise
        return True

    def leave(self, *, done: bool) -> None:
        """Called when the script has left the call; `done` if without an error."""
        if done:
            self._progress.left = self._progress.calls
        self._now = None

    def explain(self, error: RuntimeError) -> None:
        """Raise a clearer error in place of a backend's error, if the processes disagree; otherwise return.

        Raises:
            LoopError: another process is in another call, or gone.
        """
        found: list[Finding] = []
        self._in_script = True
        try:
            if not self._answers(lambda: found.extend(self._find_soon())):
                _log.warning(
                    f"{self._here('got no answer')} from the machine of process 0: the connection to it seems lost."
                )
            if found:
                raise found[0].error() from error
            if self._error is not None:  # the store is gone
                raise self._error.error() from error
        finally:
            self._in_script = False

    def stop(self, *, ended: bool = False, gone: bool = False, failed: bool = False) -> None:
        """End the thread, and publish to the other processes why; the arguments are those of `RankProgress`."""
        self._stopping.set()
        self._thread.join(timeout=5)
        store, last = self._store, replace(self._progress, ended=ended, gone=gone, failed=failed)
        self._answers(lambda: publish(store, self._rank, last))

    def end(self) -> None:
        """End the check, when the group ends on all processes; what is left of it refuses calls that need the group."""
        self.stop(ended=True)
        self.has_ended, store, self._store = True, self._store, None

        def wait_for_others() -> None:
            left = store.add("left", 1)
            while self._rank == 0 and left < self._world_size:
                time.sleep(0.01)
                left = store.add("left", 0)

        # After a group that the script has destroyed, no barrier follows the meeting at the end of the run: process 0,
        # which may hold the store, would take it from one that still waits there.
        if not dist.is_initialized():
            self._answers(wait_for_others)

    def report_failure(self, how: str) -> None:
        """End the other processes too, whatever they wait for; `how` says why this process ends, as in "has failed"."""
        self._stopping.set()
        self._answers(lambda: self._publish_end(Finding(f"process {self._rank} {how}")))

    def _publish_end(self, found: Finding) -> None:
        self._store.set("end", json.dumps(found))

    def _read_end(self) -> Finding:
        return Finding(*json.loads(self._store.get("end")))

    def _answers(self, ask: Callable[[], None]) -> bool:
        """Whether the store answered in time."""

        def asked() -> None:
            with suppress(RuntimeError):  # the store may be gone with the process that held it
                ask()

        if not self._silent:
            self._silent = not run_in_threads(_ANSWER_S, asked)
        return not self._silent

    def _wait_for_all(self, key: str) -> None:
        """Wait until every process has come to where it waits under the same key."""
        self._in_script = True
        try:
            come = self._add(key, 1)
            longest = max(0.1, self._world_size / STORE_VISITS)
            pause = longest / 10 if longest > 0.1 else 0.0005
            waited, before = 0.0, time.monotonic()
            while come < self._world_size:
                if self._error is not None:
                    raise self._error.error()
                if waited > self._limit:
                    message = (
                        f"{self._here('has waited')} for {self._limit:.0f} s, the process group's time-out: "
                        f"{self._late or 'other processes have not come'}.\n"
                        "Where a process may take that long, raise it: "
                        "Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=…))])."
                    )
                    raise of_lost_peer(LoopError(message))
                time.sleep(pause)
                pause = min(2 * pause, longest)
                come = self._add(key, 0)
                now = time.monotonic()
                waited, before = waited + min(now - before, 1.0), now
        finally:
            self._in_script = False

    def _add(self, key: str, number: int) -> int:
        """Add to a number in the store; the process that holds the store may have ended."""
        try:
            return int(self._store.add(key, number))
        except RuntimeError as error:
            raise (self._error or self._without_store()).error() from error

    def _without_store(self) -> Finding:
        """Return the message for a store that has ended; other processes of this machine are known by their ids."""
        gone = [rank for rank, one in self._others.items() if one.process_state == "gone"]
        return Finding(
            f"{self._here()}, but {self._holder()} has ended or cannot be reached any more; it holds the store by "
            f"which the processes find each other.{self._ended_too(gone)}",
            lost_peer=True,
        )

    def _holder(self) -> str:
        return "the launcher" if has_agent_store() else "process 0"

    def _ended_too(self, gone: Sequence[int]) -> str:
        """Return a sentence on who has ended besides the holder of the store; "" for nobody."""
        others = [rank for rank in gone if rank or has_agent_store()]
        has = "has" if len(others) == 1 else "have"
        return f" On this machine {_ranks(others)} {has} ended too." if others else ""

    def describe_lost(self, seconds: float) -> str:
        """Name the process that is gone, for a script that has failed because of that; "" if none is.

        Args:
            seconds: that a process may need to end whose connection has closed.
        """
        if self._error is not None:  # the lost process has published why it ends
            return self._error.text
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        deadline = time.monotonic() + seconds
        while True:
            answers: list[None] = []
            self._answers(lambda: answers.append(self._others.update(read_progress(self._store, others))))  # noqa: B023
            gone = [rank for rank, one in self._others.items() if one.is_gone]
            first = [rank for rank in gone if not self._others[rank].failed] or gone
            if first or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        if not answers:  # what this process knows of the others is old: which are gone, and not which one went first
            ends = "has ended" if 0 in gone and not has_agent_store() else "has ended or cannot be reached"
            holder = f"{self._holder()}, which holds the store, {ends}"
            return f"process {self._rank} failed, and {holder}.{self._ended_too(gone)}"
        if not first:
            return ""
        has = "has" if len(first) == 1 else "have"
        ended = f"{_ranks(first)} {has} ended, and process {self._rank} failed by that"
        seen = {rank: self._others[rank] for rank in first}
        places = "; ".join(f"process {r} was last seen at {p.line or 'its start'}{p.end}" for r, p in seen.items())
        return f"{ended}: {places}."

    # ---- the watching thread ---------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            self._watch_store()
        except (RuntimeError, ValueError):  # the store or the group is gone
            if not self._stopping.is_set():
                self._watch_without_store()

    def _watch_without_store(self) -> None:
        """End the process when its script waits in a call: who holds the store comes to none. Alone it may go on."""
        call = None
        while not self._stopping.wait(self._patience.asks):
            if self._now is not None and self._now is call and not self._in_script:
                self._error = self._error or self._without_store()
                end_process(self._error.text)
            call = self._now

    def _watch_store(self) -> None:
        waiting: Waiting | None = None
        before = time.monotonic()
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        while not self._stopping.wait(self._patience.tick):
            now = time.monotonic()
            awake, before = min(now - before, 2 * self._patience.tick), now
            self._look_at_script(awake)
            publish(self._store, self._rank, self._progress)
            if not self._others and self._world_size <= _KNOWN and self._store.check([f"at/{r}" for r in others]):
                self._others = read_progress(self._store, others)
            if self._store.check(["end"]):
                self._end_with_others()
                return
            call = self._now
            if call is None or waiting is None or waiting.call is not call:
                waiting = None if call is None else Waiting(call, self._patience.late)
            elif self._finds(waiting, awake):
                return

    def _look_at_script(self, awake: float) -> None:
        """See what the script does, `awake` seconds after the last time; warn where it compiles for long."""
        running = running_functions(self._script)
        seen, line, busy = self._progress, script_line(running), long_operation(running)
        seen.since = seen.since + awake if line == seen.line else 0.0
        seen.quiet = 0.0 if busy else seen.quiet + awake
        seen.beat, seen.line, seen.busy = seen.beat + 1, line, busy
        self._compiled = self._compiled + awake if busy.startswith("compiles ") else 0.0
        if not self._compiled:
            self._warns_at = self._patience.builds
        elif self._compiled >= self._warns_at:
            self._warns_at *= 2
            _log.warning(
                f"process {self._rank} {busy}, for {self._compiled:.0f} s so far ({line}); other processes wait for it."
            )

    def _end_with_others(self) -> None:
        """Another process has found an error, or ends and has published that."""
        self._error = self._read_end()
        error = self._error.text
        # The launcher of one machine ends all by then; and this process may be reporting why it ends by itself.
        if not self._in_script and not self._stopping.wait(self._patience.asks):
            end_process(error if error.endswith(".") else f"{error}; process {self._rank} ends with it.")

    def _finds(self, waiting: Waiting, awake: float) -> bool:
        """Look at the others, if this is the process to do so; whether the run ends."""
        call = waiting.call
        waiting.seconds += awake
        if waiting.seconds < max(self._patience.tick, waiting.looks * self._patience.asks):
            return False
        waiting.looks += 1
        if self._store.add(f"looks/{call.number}/{waiting.looks}", 1) > 1:
            return False  # another one that waits here looks: of a thousand, one at a time
        found = self._look(waiting)
        # Twice: what was read may be older than this process' way out of the call.
        if found is None or self._stopping.wait(2 * self._patience.tick) or self._now is not call:
            return False
        found = self._look(waiting)
        if found is None or self._now is not call:
            return False
        self._publish_end(found)
        if self._rank == 0 and not has_agent_store():
            # The store ends with this process. The others read the message at their next tick.
            self._stopping.wait(2 * self._patience.tick)
        self._error = found
        if not self._in_script:
            end_process(found.text)
        return True

    def _find_soon(self) -> list[Finding]:
        """What is wrong with the others, for a call that has failed: the others have a moment to say where they are."""
        assert self._now is not None, "asked inside a call"
        waiting = Waiting(self._now, float("inf"))
        for _ in range(max(2, round(self._patience.asks / self._patience.tick))):
            time.sleep(self._patience.tick)
            if self._store.check(["end"]):  # of a process that has found it, and ends or has ended
                return [self._read_end()]
            if (found := self._look(waiting)) is not None:
                return [found]
        return []

    def _look(self, waiting: Waiting) -> Finding | None:
        """What is wrong with the others, as one message; None if nothing is. Warns of those that are late."""
        others = read_progress(self._store, [r for r in range(self._world_size) if r != self._rank])
        self._others = others
        found = find_mismatch(waiting.call, others, in_loop=begins_loop(running_functions(self._script)))
        if found is not None:
            return found._replace(text=f"{self._here()}, but {found.text}")
        self._late, quiet = describe_late(waiting, others)
        if quiet >= waiting.warns_at:
            # Once, of all that wait.
            if self._store.add(f"warned/{waiting.call.number}/{waiting.warns_at:g}", 1) == 1:
                until = "" if self._limit == float("inf") else f" ({self._limit:.0f} s)"
                _log.warning(
                    f"{self._here('has waited')} for {waiting.seconds:.0f} s: {self._late}. "
                    f"It waits until the process group's time-out{until}."
                )
            waiting.warns_at *= 2
        return None

    def _here(self, state: str = "is") -> str:
        line = script_line(running_functions(self._script))
        return f"process {self._rank} {state} in {self._progress.call}() ({line}){self._progress.end}"


def _describe_end(line: str) -> str:
    """Describe what the script did before its end; "" if it calls end_training() itself, as it should.

    Args:
        line: the last line of the script that the watching thread has seen.
    """
    done = [] if dist.is_initialized() else ["torch.distributed.destroy_process_group()"]
    if is_at_exit():
        seen = f"; last seen at {line}" if line not in ("", NO_LINE) else ""
        done.append(last_exit() or f"the end of its script (its last line, quit() or SystemExit{seen})")
    return f", after {' and '.join(done)}" if done else ""


# ---- this process' check ---------------------------------------------------------------------------------------------

_check: CollectiveCheck | None = None
_watched_group: Any = None
_numbers = count(1)  # of the groups that are watched


def start_watching(patience: Patience | None = None) -> None:
    """Watch the calls of the default process group, if it has several processes and is not watched yet."""
    global _check, _watched_group
    group: Any = dist.group.WORLD
    if group is _watched_group:
        return
    end_watching()
    if group.size() == 1:
        _check = None
        return
    # Groups may follow one another in the same store.
    store = c10d.PrefixStore(f"zero_plugin/collective_check/{next(_numbers)}", c10d._get_default_store())
    # Each writes where it is and asks whether all are to end: two visits.
    patience = patience or Patience(tick=max(1.0, 2 * group.size() / STORE_VISITS))
    _check = CollectiveCheck(store, dist.get_rank(), group.size(), patience, time_out(group))
    _watched_group = group
    note_exits()
    atexit.unregister(_report_exit)
    atexit.register(_report_exit)


def time_out(group: Any) -> float:
    """The time-out of the group's operations in seconds; infinite for a backend that has none."""
    device = torch.device(dist.get_backend_config(group).split(",")[0].split(":")[0])
    options = getattr(group._get_backend(device), "options", None)
    limit = getattr(options, "_timeout", None)
    return float("inf") if limit is None else float(limit.total_seconds())


def end_watching() -> None:
    """Stop the check; called on all processes when the group ends."""
    global _watched_group
    if _check is not None and not _check.has_ended:
        _check.end()
    _watched_group = None


def _report_exit() -> None:
    """Report to the other processes that this one exits, and whether by an uncaught exception.

    A backend's error says that a connection was closed, and not by whom: that is logged here.
    """
    if _check is None or _check.has_ended:
        return
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if isinstance(error, RuntimeError) and (lost := _check.describe_lost(_ENDING_S)):
        _log.error(lost)
    _check.stop(gone=True, failed=error is not None)


def pass_together() -> None:
    """Count an operation of the training that returns, or ends its step, only when all processes have come to it."""
    own_progress().passes += 1


def own_progress() -> RankProgress:
    """Return what this process publishes, for a session that counts its `passes`; nobody reads it without a check."""
    return RankProgress() if _check is None else _check._progress


def report_failure(how: str) -> None:
    """End the other processes within seconds; see `CollectiveCheck.report_failure`."""
    if _check is not None and not _check.has_ended:
        _check.report_failure(how)


def collective(
    name: str, *, waits_for_all: bool = False, after_group: Literal["refuse", "alone", "meet"] = "refuse"
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator of a function that every process has to call.

    Args:
        name: what messages call it.
        waits_for_all: the processes wait for each other in the store first; for calls that are rare and long.
        after_group: what a call does after the script has destroyed the process group. "refuse" raises a LoopError,
            because the result would be that of one process. "alone" runs the function, which needs no other process.
            "meet" runs it once all processes have come, because the store outlives the group.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            check, without_group = _check, not dist.is_initialized()
            refuses = without_group and after_group == "refuse"
            # An ended check only refuses. It watches no later group, and an earlier run may close after it.
            if check is None or (check.has_ended and not refuses):
                return function(*args, **kwargs)
            if refuses:
                check.refuse_without_group(name)
            waits = waits_for_all and not (without_group and after_group == "alone")
            if not check.enter(name, waits_for_all=waits):
                return function(*args, **kwargs)
            done = False
            try:
                result = function(*args, **kwargs)
                done = True
            except RuntimeError as error:  # backends raise one when they are given different operations
                check.explain(error)
                raise
            finally:
                check.leave(done=done)
            return result

        return checked

    return decorate
