"""Checks that all ranks make the same collective calls, names the ranks that do not, and ends a run that is stuck.

`rank_progress.py` has what each rank publishes, `mismatch.py` the rule that judges it. This module has the watching
thread, and the decorator of collective calls.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Final, Literal, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from zero_plugin.distributed.joining import STORE_VISITS, has_agent_store
from zero_plugin.distributed.mismatch import (
    Call,
    Finding,
    Waiting,
    describe_late,
    find_mismatch,
    show_ranks,
)
from zero_plugin.distributed.process_end import end_process, is_at_exit, run_in_threads
from zero_plugin.distributed.rank_progress import RankProgress, begin_progress, publish, read_progress
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

_log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_KNOWN: Final = 64  # largest run in which each process reads the others' ids early, before it waits for any of them
_ENDING_S: Final = 0.5  # a process's connections close first and make others fail; the process itself ends a bit later
_ANSWER_S: Final = 10.0  # time for an answer of the store: after a cut connection, it would never answer


@dataclass(frozen=True, slots=True)
class Patience:
    """The intervals of the check, in seconds.

    Attributes:
        tick: interval at which the watching thread publishes its process's progress.
        asks: interval at which the others' progress is read inside one call.
        late: time until a warning names a late process. It doubles with each warning.
        builds: time until a process warns that it compiles. It doubles with each warning.
    """

    tick: float = 1.0
    asks: float = 3.0
    late: float = 60.0
    builds: float = 10.0


class CollectiveCheck:
    """One process's part in the check that all processes make the same collective calls in the same order.

    A call costs a few microseconds: the check counts it and sends nothing. Once in a `tick`, a thread publishes the
    progress of its process (`RankProgress`) in the store of the process group. So each process knows about another one:

    * the number of collective calls that it has entered, and the name of the last one;
    * the number of passes since then: parts of the training that need all processes (a backward that averages, a
      step of ZeRO, a forward that fetches partitioned weights);
    * its line of the script, and how long it has been there; its current import, compilation or save, and the time
      since the last one;
    * whether it is gone: it has published that at its end, or its process id no longer exists on this machine. For
      another machine, only published state counts. Silence is never taken as exit.

    If processes stay inside one call for long, one of them at a time reads the others' progress. Only the rule of
    `find_mismatch` ends a run. It must hold twice in a row.

    A process that does anything outside the rule (other operations of torch, a download, a debugger) is merely late. A
    warning names it when it has had no import, build or save for `late` seconds. Whether the run ends is then up to the
    process group's own timeout.

    Time is counted in ticks during which this process was awake. A process that was stopped and continued has not
    waited.

    In rare and long calls (`waits_for_all`), the processes first wait for each other in the store. An error there is a
    `LoopError` in the script. In any other call, the script waits in a C++ operation that cannot be interrupted. So the
    check prints the error, makes the calls of `call_before_end`, and exits with 1.

    Args:
        store: the store that all processes share.
        rank: this process's rank.
        world_size: the number of processes.
        patience: the intervals of the check.
        limit: seconds after which waiting in the store fails; the process group's own timeout.

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
        self._silent = False  # whether the store has failed to answer in time
        self._late = ""  # description of the processes that are late for the current call
        self._script = threading.get_ident()
        self._compiled = 0.0  # seconds of the script's current compilation
        self._warns_at = patience.builds
        self._stopping = threading.Event()
        self._others: dict[int, RankProgress] = {}  # as last read; the process ids are of use after the store has gone
        # Publish now, not at the first tick: until a process publishes its id, no other process can notice its death.
        publish(store, rank, self._progress)
        self._thread = threading.Thread(target=self._watch, name="zero_plugin collective check", daemon=True)
        self._thread.start()

    def refuse_without_group(self, name: str) -> None:
        """Raise if the process group has ended, unless the call is part of another call."""
        if self._now is None:
            by = "end_training()" if self.has_ended else "this script, by torch.distributed.destroy_process_group(),"
            raise LoopError(
                f"{name}() needs the other processes, but {by} has ended the process group.\nCall {name}() before that."
            )

    def enter(self, name: str, *, waits_for_all: bool) -> bool:
        """Record that the script enters a collective call. Return False if the call is part of another call.

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
        """Record that the script has left the call; `done` if without an error."""
        if done:
            self._progress.left = self._progress.calls
        self._now = None

    def explain(self, error: RuntimeError) -> None:
        """Raise a clearer error than the backend's if the processes disagree; otherwise return.

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
            if self._error is not None:  # the watching thread has noticed that the store is gone
                raise self._error.error() from error
        finally:
            self._in_script = False

    def stop(self, *, ended: bool = False, gone: bool = False, failed: bool = False) -> None:
        """Stop the thread, and publish the reason for the other processes. See `RankProgress` for the arguments."""
        self._stopping.set()
        self._thread.join(timeout=5)
        store, last = self._store, replace(self._progress, ended=ended, gone=gone, failed=failed)
        self._answers(lambda: publish(store, self._rank, last))

    def end(self) -> None:
        """End the check when the group ends on all processes. It then only refuses calls that need the group."""
        self.stop(ended=True)
        self.has_ended, store, self._store = True, self._store, None

        def wait_for_others() -> None:
            left = store.add("left", 1)
            while self._rank == 0 and left < self._world_size:
                time.sleep(0.01)
                left = store.add("left", 0)

        # If the script has destroyed the group, no barrier follows the wait at the end of the run. Process 0 may hold
        # the store, so without this wait it could end the store while others still wait there.
        if not dist.is_initialized():
            self._answers(wait_for_others)

    def report_failure(self, how: str) -> None:
        """End the other processes too, wherever they wait.

        Args:
            how: why this process ends, such as "has failed".
        """
        self._stopping.set()
        self._answers(lambda: self._publish_end(Finding(f"process {self._rank} {how}")))

    def _publish_end(self, found: Finding) -> None:
        self._store.set("end", json.dumps(found))

    def _read_end(self) -> Finding:
        return Finding(*json.loads(self._store.get("end")))

    def _answers(self, ask: Callable[[], None]) -> bool:
        """Call `ask`. Return whether the store answered in time."""

        def asked() -> None:
            with suppress(RuntimeError):  # the store may have ended with the process that held it
                ask()

        if not self._silent:
            self._silent = not run_in_threads(_ANSWER_S, asked)
        return not self._silent

    def _wait_for_all(self, key: str) -> None:
        """Wait until every process waits under the same key."""
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
                        "If a process may take that long, raise it: "
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
        """Add to a number in the store. Raise LoopError if the process that holds the store has ended."""
        try:
            return int(self._store.add(key, number))
        except RuntimeError as error:
            raise (self._error or self._without_store()).error() from error

    def _without_store(self) -> Finding:
        """Return the message for a store that has ended. Process ids tell which processes of this machine are gone."""
        gone = [rank for rank, one in self._others.items() if one.process_state == "gone"]
        return Finding(
            f"{self._here()}, but {self._holder()} has ended or cannot be reached any more. It holds the store that "
            f"connects the processes.{self._ended_too(gone)}",
            lost_peer=True,
        )

    def _holder(self) -> str:
        return "the launcher" if has_agent_store() else "process 0"

    def _ended_too(self, gone: Sequence[int]) -> str:
        """Return a sentence that names ended processes other than the store's holder; "" if there are none."""
        others = [rank for rank in gone if rank or has_agent_store()]
        has = "has" if len(others) == 1 else "have"
        return f" On this machine {show_ranks(others)} {has} ended too." if others else ""

    def describe_lost(self, seconds: float) -> str:
        """Return a message that names the lost process, for a script that failed because of it; "" if none is lost.

        Args:
            seconds: the time that a process may take to end after its connection has closed.
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
        if not answers:  # the last known progress is old: it shows which processes are gone, but not which was first
            ends = "has ended" if 0 in gone and not has_agent_store() else "has ended or cannot be reached"
            holder = f"{self._holder()}, which holds the store, {ends}"
            return f"process {self._rank} failed, and {holder}.{self._ended_too(gone)}"
        if not first:
            return ""
        has = "has" if len(first) == 1 else "have"
        ended = f"{show_ranks(first)} {has} ended, and process {self._rank} failed by that"
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
        """End the process if its script waits in a call, which the lost holder of the store can never reach.

        Outside calls, the script may continue alone.
        """
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
        """Update the progress, `awake` seconds after the last time. Warn if the script compiles for long."""
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
        """End this process, because another process has published an error or its own end."""
        self._error = self._read_end()
        error = self._error.text
        # Wait first: the launcher ends all processes of a machine anyway, and this one may be reporting its own end.
        if not self._in_script and not self._stopping.wait(self._patience.asks):
            end_process(error if error.endswith(".") else f"{error}; process {self._rank} ends with it.")

    def _finds(self, waiting: Waiting, awake: float) -> bool:
        """Check the others' progress if it is this process's turn. Return whether the run ends."""
        call = waiting.call
        waiting.seconds += awake
        if waiting.seconds < max(self._patience.tick, waiting.looks * self._patience.asks):
            return False
        waiting.looks += 1
        if self._store.add(f"looks/{call.number}/{waiting.looks}", 1) > 1:
            return False  # one process looks at a time, since a thousand may wait in this call
        found = self._look(waiting)
        # Look twice: the values read may be older than this process's own exit from the call.
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
        """Find a mismatch after a failed call. Wait a moment, so the others can publish their progress."""
        assert self._now is not None, "asked inside a call"
        waiting = Waiting(self._now, float("inf"))
        for _ in range(max(2, round(self._patience.asks / self._patience.tick))):
            time.sleep(self._patience.tick)
            if self._store.check(["end"]):  # another process has found the mismatch, and ends or has ended
                return [self._read_end()]
            if (found := self._look(waiting)) is not None:
                return [found]
        return []

    def _look(self, waiting: Waiting) -> Finding | None:
        """Return a mismatch with the others, or None. Warn about late processes."""
        others = read_progress(self._store, [r for r in range(self._world_size) if r != self._rank])
        self._others = others
        found = find_mismatch(waiting.call, others, in_loop=begins_loop(running_functions(self._script)))
        if found is not None:
            return found._replace(text=f"{self._here()}, but {found.text}")
        self._late, quiet = describe_late(waiting, others)
        if quiet >= waiting.warns_at:
            # Only one of the waiting processes warns.
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


# ---- this process's check --------------------------------------------------------------------------------------------

_check: CollectiveCheck | None = None
_watched_group: Any = None
_numbers = count(1)  # one per watched group


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
    # Several groups may use the same store one after another, so each check needs its own prefix.
    store = c10d.PrefixStore(f"zero_plugin/collective_check/{next(_numbers)}", c10d._get_default_store())
    # Each tick takes two visits of the store: publish the progress, and check whether all are to end.
    patience = patience or Patience(tick=max(1.0, 2 * group.size() / STORE_VISITS))
    _check = CollectiveCheck(store, dist.get_rank(), group.size(), patience, time_out(group))
    _watched_group = group
    note_exits()
    atexit.unregister(_report_exit)
    atexit.register(_report_exit)


def time_out(group: Any) -> float:
    """Return the timeout of the group's operations in seconds; infinite for a backend without a timeout."""
    device = torch.device(dist.get_backend_config(group).split(",")[0].split(":")[0])
    options = getattr(group._get_backend(device), "options", None)
    limit = getattr(options, "_timeout", None)
    return float("inf") if limit is None else float(limit.total_seconds())


def end_watching() -> None:
    """Stop the check. Called on all processes when the group ends."""
    global _watched_group
    if _check is not None and not _check.has_ended:
        _check.end()
    _watched_group = None


def _report_exit() -> None:
    """Report to the other processes that this one exits, and whether by an uncaught exception.

    A backend's error does not name the process that closed a connection. This function logs it.
    """
    if _check is None or _check.has_ended:
        return
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if isinstance(error, RuntimeError) and (lost := _check.describe_lost(_ENDING_S)):
        _log.error(lost)
    _check.stop(gone=True, failed=error is not None)


def pass_together() -> None:
    """Count an operation of the training that returns, or ends its step, only when all processes have reached it."""
    own_progress().passes += 1


def own_progress() -> RankProgress:
    """Return this process's progress, for a session that counts its `passes`. Without a check it is not published."""
    return RankProgress() if _check is None else _check._progress


def report_failure(how: str) -> None:
    """End the other processes within seconds; see `CollectiveCheck.report_failure`."""
    if _check is not None and not _check.has_ended:
        _check.report_failure(how)


def collective(
    name: str, *, waits_for_all: bool = False, after_group: Literal["refuse", "alone", "meet"] = "refuse"
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function that every process has to call.

    Args:
        name: its name in messages.
        waits_for_all: whether the processes first wait for each other in the store; for rare and long calls.
        after_group: what a call does after the script has destroyed the process group. "refuse" raises a LoopError,
            because the result would be that of one process. "alone" runs the function, which needs no other process.
            "meet" runs it once all processes have come, because the store outlives the group.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            check, without_group = _check, not dist.is_initialized()
            refuses = without_group and after_group == "refuse"
            # An ended check only refuses calls. It does not watch later groups, and an earlier run may close after it.
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
            except RuntimeError as error:  # a backend raises it if the processes start different operations
                check.explain(error)
                raise
            finally:
                check.leave(done=done)
            return result

        return checked

    return decorate
