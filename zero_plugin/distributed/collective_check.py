"""Watches that all ranks come to the same collective calls, names who does not, and ends a run that cannot go on."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from zero_plugin.distributed.mismatch import (
    Call,
    ScriptView,
    Waiting,
    begin_progress,
    describe_late,
    describe_overdue,
    find_mismatch,
    publish,
    read_progress,
    script_line,
)
from zero_plugin.errors import LoopError

_log = logging.getLogger(__name__)

_LAST_CALLS_S: Final = 10.0
_last_calls: Final[list[weakref.WeakMethod[Callable[[], None]]]] = []


def call_before_end(method: Callable[[], None]) -> None:
    """Have a bound method called before this process ends by an error; it is not kept alive, and may take seconds."""
    _last_calls[:] = [known for known in _last_calls if known() is not None]
    _last_calls.append(weakref.WeakMethod(method))


def make_last_calls() -> None:
    """Call what was given to `call_before_end`, at the same time, and wait for ten seconds at most."""
    calls = [call for given in _last_calls if (call := given()) is not None]
    _last_calls.clear()
    within(_LAST_CALLS_S, *calls)


def end_process(message: str) -> NoReturn:
    """End this process with exit code 1, from any thread, after its last calls."""
    _log.error(message)
    make_last_calls()
    sys.stdout.flush()
    os._exit(1)


def within(seconds: float, *calls: Callable[[], None]) -> bool:
    """Whether all calls returned in time, each in a thread of its own."""
    threads = [threading.Thread(target=call, name="zero_plugin call in time", daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


P = ParamSpec("P")
R = TypeVar("R")

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

    Calls that are rare and long (`meets`) wait for each other in the store before they touch the process group. There
    an error is a `LoopError` in the script. In any other call the script sits in an operation of C++ that nothing can
    interrupt, so the error is printed, last calls are made (`call_before_end`), and the process ends with exit code 1.

    Args:
        store: shared by all processes.
        rank: of this process.
        world_size: of all.
        patience: how long it waits.
        limit: seconds after which waiting in the store fails: the process group's own time-out.
    """

    def __init__(self, store: Any, rank: int, world_size: int, patience: Patience, limit: float = float("inf")) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._patience = patience
        self._limit = limit
        self._progress = begin_progress()
        self._now: Call | None = None
        self._in_script = False  # whether the script can raise an error: it waits in the store
        self._exchanges = 0
        self._error: str | None = None
        self._silent = False  # the store has not answered in time
        self._late = ""  # who has not come to the present call, as far as known
        self._script = threading.get_ident()
        self._view = ScriptView(self._script, patience.builds, self._progress)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="zero_plugin collective check", daemon=True)
        self._thread.start()

    def enter(self, name: str, *, meets: bool) -> bool:
        """The script comes to a collective call. False inside another one, which it is a part of.

        Raises:
            LoopError: another process is in another call, or gone, or has not come in time to a call that `meets`.
        """
        if self._now is not None:
            return False
        progress, self._late = self._progress, ""
        passes, progress.passes = progress.passes, 0
        progress.calls, progress.call = progress.calls + 1, name
        self._now = Call(progress.calls, name, passes)
        if meets:
            try:
                self._wait_for_all(f"met/{progress.calls}/{name}")
            except BaseException:
                self._now = None
                raise
        return True

    def leave(self, *, done: bool) -> None:
        """The script has left the call, with its result or by an error."""
        if done:
            self._progress.left = self._progress.calls
        self._now = None

    def pass_together(self) -> None:
        """The training comes to an operation that needs all processes, and that is not a call of its own."""
        self._progress.passes += 1

    def exchange(self, word: str) -> list[str]:
        """Inside a call: every process' word, by rank; they wait for each other in the store.

        Raises:
            LoopError: as for a call that `meets`.
        """
        self._exchanges += 1
        keys = [f"word/{self._exchanges}/{rank}" for rank in range(self._world_size)]
        self._store.set(keys[self._rank], word)
        self._wait_for_all(f"word/{self._exchanges}")
        return [each.decode() for each in self._store.multi_get(keys)]

    def explain(self, error: RuntimeError) -> None:
        """Raise what lies behind a backend's error; return if it is not that the processes disagree.

        Raises:
            LoopError: another process is in another call, or gone.
        """
        found: list[str] = []
        self._in_script = True
        try:
            if not self._answers(lambda: found.extend(self._find_soon())):
                _log.warning(
                    f"{self._here('got no answer')} from the machine of process 0: the connection to it seems lost."
                )
            if found:
                raise LoopError(found[0]) from error
        finally:
            self._in_script = False

    def stop(self, *, ended: bool = False, gone: bool = False, failed: bool = False) -> None:
        """End the thread; this is the last that the others see, as in `RankProgress`."""
        self._stopping.set()
        self._thread.join(timeout=5)
        last = replace(self._progress, ended=ended, gone=gone, failed=failed)
        self._answers(lambda: publish(self._store, self._rank, last))

    def tell_loss(self, how: str) -> None:
        """Have the others end, whatever they wait in: this process ends, and `how`."""
        self._stopping.set()
        self._answers(lambda: self._store.set("end", f"process {self._rank} {how}"))

    def _answers(self, ask: Callable[[], None]) -> bool:
        """Whether the store answered in time."""

        def asked() -> None:
            with suppress(RuntimeError):  # the store may be gone with the process that held it
                ask()

        if not self._silent:
            self._silent = not within(_ANSWER_S, asked)
        return not self._silent

    def _wait_for_all(self, key: str) -> None:
        """Wait until every process has come to where it waits under the same key."""
        self._in_script = True
        try:
            come = self._store.add(key, 1)
            pause, waited, before = 0.0005, 0.0, time.monotonic()
            while come < self._world_size:
                if self._error is not None:
                    raise LoopError(self._error)
                if waited > self._limit:
                    raise LoopError(describe_overdue(self._here("has waited"), self._limit, self._late))
                time.sleep(pause)
                pause = min(2 * pause, 0.1)
                come = self._store.add(key, 0)
                now = time.monotonic()
                waited, before = waited + min(now - before, 1.0), now
        finally:
            self._in_script = False

    # ---- the watching thread ---------------------------------------------------------------------------------------

    def _watch(self) -> None:
        waiting: Waiting | None = None
        before = time.monotonic()
        with suppress(RuntimeError, ValueError):  # the store or the group is gone
            while not self._stopping.wait(self._patience.tick):
                now = time.monotonic()
                awake, before = min(now - before, 2 * self._patience.tick), now
                self._view.look(awake, lambda line: _log.warning(f"process {self._rank} {line}"))
                publish(self._store, self._rank, self._progress)
                if self._store.check(["end"]):
                    self._end_with_others()
                    return
                call = self._now
                if call is None or waiting is None or waiting.call is not call:
                    waiting = None if call is None else Waiting(call, self._patience.late)
                elif self._finds(waiting, awake):
                    return

    def _end_with_others(self) -> None:
        """Another process has found an error, or ends and has published that."""
        error = self._error = self._store.get("end").decode()
        # The launcher of one machine ends all by then; and this process may be reporting why it ends by itself.
        if not self._in_script and not self._stopping.wait(self._patience.asks):
            end_process(error if error.endswith(".") else f"{error}; process {self._rank} ends with it.")

    def _finds(self, waiting: Waiting, awake: float) -> bool:
        """Look at the others, if this is the process to do so; whether the run ends."""
        call = waiting.call
        waiting.seconds += awake
        if waiting.seconds < (waiting.looks + 1) * self._patience.asks:
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
        self._error = found
        self._store.set("end", found)
        if not self._in_script:
            end_process(found)
        return True

    def _find_soon(self) -> list[str]:
        """What is wrong with the others, for a call that has failed: the others have a moment to say where they are."""
        assert self._now is not None, "asked inside a call"
        waiting = Waiting(self._now, float("inf"))
        for _ in range(max(2, round(self._patience.asks / self._patience.tick))):
            time.sleep(self._patience.tick)
            if self._store.check(["end"]):  # of a process that has found it, and ends or has ended
                return [self._store.get("end").decode()]
            if (found := self._look(waiting)) is not None:
                return [found]
        return []

    def _look(self, waiting: Waiting) -> str | None:
        """What is wrong with the others, as one message; None if nothing is. Warns of those that are late."""
        others = read_progress(self._store, [r for r in range(self._world_size) if r != self._rank])
        found = find_mismatch(waiting.call, others)
        if found is not None:
            return f"{self._here()}, but {found}"
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
        return f"process {self._rank} {state} in {self._progress.call}() ({script_line(self._script)})"


# ---- this process' check ---------------------------------------------------------------------------------------------

_check: CollectiveCheck | None = None
_watched_group: Any = None
_groups_watched = 0


def start_watching(patience: Patience | None = None) -> None:
    """Watch the calls of the default process group, if it has several processes and is not watched yet."""
    global _check, _watched_group, _groups_watched
    group: Any = dist.group.WORLD
    if group.size() == 1 or group is _watched_group:
        return
    end_watching()
    _groups_watched += 1  # groups may follow one another in the same store
    store = c10d.PrefixStore(f"zero_plugin/collective_check/{_groups_watched}", c10d._get_default_store())
    patience = patience or Patience(tick=max(1.0, group.size() / 500))  # the store has a thousand visitors a second
    _check = CollectiveCheck(store, dist.get_rank(), group.size(), patience, time_out(group))
    _watched_group = group
    atexit.unregister(_publish_end)
    atexit.register(_publish_end)


def time_out(group: Any) -> float:
    """Of the group's operations, in seconds; without end for a backend that does not say."""
    device = torch.device(dist.get_backend_config(group).split(",")[0].split(":")[0])
    options = getattr(group._get_backend(device), "options", None)
    limit = getattr(options, "_timeout", None)
    return float("inf") if limit is None else float(limit.total_seconds())


def end_watching() -> None:
    """All processes have come to their end; nothing is left to check."""
    global _check, _watched_group
    if _check is not None:
        _check.stop(ended=True)
    _check = _watched_group = None


def _publish_end() -> None:
    if _check is not None:
        _check.stop(gone=True, failed=any(getattr(sys, name, None) for name in ("last_exc", "last_value")))


def exchange(word: str) -> list[str]:
    """Inside a `collective` call: every process' word, by rank; of one process, its own.

    Raises:
        LoopError: another process does not come to it.
    """
    return [word] if _check is None else _check.exchange(word)


def pass_together() -> None:
    """Count an operation of the training that returns, or ends its step, only when all processes have come to it."""
    if _check is not None:
        _check.pass_together()


def tell_loss(how: str) -> None:
    """Have the other processes end within seconds, whatever they wait in: this one ends, and `how`."""
    if _check is not None:
        _check.tell_loss(how)


def collective(name: str, *, meets: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator of a function that every process has to call.

    Args:
        name: what messages call it.
        meets: the processes wait for each other in the store first; for calls that are rare and long.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            check = _check
            if check is None or not dist.is_initialized() or not check.enter(name, meets=meets):
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
