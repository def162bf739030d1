"""Watches that all processes come to the same collective calls: who is elsewhere, or gone, is named within seconds."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from zero_plugin.errors import LoopError
from zero_plugin.standing import Standing, issued_operations, script_line

__all__ = ["Agreement", "Patience", "collective", "end_watching", "exchange", "start_watching", "tell_loss", "time_out"]

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a process waits for the others, in seconds.

    Attributes:
        tick: between two looks of the watching thread.
        asks: inside one call, before the others are asked where they are.
        late: before a process that has not come is named; then after twice as long, and so on.
    """

    tick: float = 1.0
    asks: float = 3.0
    late: float = 10.0


class Agreement:
    """One process' part in the agreement of all about the order of collective calls.

    A call costs a few microseconds: it is counted here, and nothing is sent. A thread looks every `tick` seconds. Where
    the process has been inside one call for long, the thread asks all others through the store of the process group,
    their threads answer, and the answers decide:

    * one that is in a different call as its k-th, or has ended: an error;
    * one that has not come to the k-th call, but has given the process groups more operations than this one had when it
      came: it went on to another operation (a backward, say) which waits for this process: an error too;
    * one that has merely not come: a warning. The process group's own time-out decides in the end.

    Calls that are rare and long (`meets`) wait for each other in the store before they touch the process group. There
    an error is a `LoopError` in the script. In any other call the script sits in an operation of C++ that nothing can
    interrupt, so the error is printed and the process ends with exit code 1.

    gloo counts sends between two processes too, so that a script that sends on the default group of CPUs, and only on
    some processes, has to do it in a group of its own.

    Args:
        store: shared by all processes.
        rank: of this process.
        world_size: of all.
        patience: how long it waits.
        limit: seconds after which a meeting fails: the process group's own time-out.
    """

    def __init__(self, store: Any, rank: int, world_size: int, patience: Patience, limit: float = float("inf")) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._patience = patience
        self._limit = limit
        self._calls = 0
        self._call = ""
        self._since: float | None = None  # when the present call was entered
        self._issued_before = 0
        self._meeting = False  # the script waits in the store, where it can be told of an error
        self._exchanges = 0
        self._error: str | None = None
        self._answered = 0
        self._silent = False  # the store has not answered a question in time
        self._late = ""  # who has not come to the present call, as far as known
        self._next_warning = 0.0
        self._script = threading.get_ident()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="zero_plugin agreement", daemon=True)
        self._thread.start()

    def enter(self, call: str, *, meets: bool) -> bool:
        """The script comes to a collective call. False inside another one, which it is a part of.

        Raises:
            LoopError: another process is in a different call, or gone, or has not come to a meeting in time.
        """
        if self._since is not None:
            return False
        self._issued_before = issued_operations()
        self._calls += 1
        self._call = call
        self._next_warning = self._patience.late
        self._late = ""
        self._since = time.monotonic()
        if meets:
            try:
                self._wait_for_all(f"met/{self._calls}/{call}")
            except BaseException:
                self._since = None
                raise
        return True

    def leave(self) -> None:
        """The script has left the call."""
        self._since = None

    def exchange(self, word: str) -> list[str]:
        """Inside a call: what every process says there, by rank; they wait for each other in the store.

        Raises:
            LoopError: as for a meeting.
        """
        self._exchanges += 1
        keys = [f"said/{self._exchanges}/{rank}" for rank in range(self._world_size)]
        self._store.set(keys[self._rank], word)
        self._wait_for_all(f"said/{self._exchanges}")
        return [said.decode() for said in self._store.multi_get(keys)]

    def explain(self, error: RuntimeError) -> None:
        """Raise what lies behind a backend's error; return if it is not that the processes disagree.

        Raises:
            LoopError: another process is in a different call, or gone.
        """
        found: list[str | None] = []
        if not self._answers_within(self._patience.late, lambda: found.append(self._look())):
            _print(f"{self._here('got no answer')} from the machine of process 0: the connection to it seems lost.")
        if found and found[0] is not None:
            raise LoopError(found[0]) from error

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        self._thread.join(timeout=5)

    def tell_end(self, *, failed: bool) -> None:
        """Tell the others that this process ends: the answer to every question to come."""
        last = Standing(sys.maxsize, self._calls, self._call, gone=True, failed=failed)
        self._answers_within(self._patience.late, lambda: self._publish(last))

    def tell_loss(self, how: str) -> None:
        """Have the others end, whatever they wait in: this process ends, and `how`."""

        def tell() -> None:
            self._store.set("lost", f"process {self._rank} {how}")
            self._store.add("asked", 1)  # which every thread looks for

        self._answers_within(self._patience.late, tell)

    def _answers_within(self, seconds: float, ask: Callable[[], None]) -> bool:
        """Whether the store answered in time; a question to one behind a cut cable would never come back."""

        def asked() -> None:
            with suppress(RuntimeError):  # the store may be gone with the process that held it
                ask()

        if self._silent:
            return False
        asking = threading.Thread(target=asked, name="zero_plugin question", daemon=True)
        asking.start()
        asking.join(seconds)
        self._silent = asking.is_alive()
        return not self._silent

    def _wait_for_all(self, key: str) -> None:
        """Wait until every process has come to where it waits under the same key."""
        self._meeting = True
        deadline = time.monotonic() + self._limit
        try:
            come = self._store.add(key, 1)
            pause = 0.0005
            while come < self._world_size:
                if self._error is not None:
                    raise LoopError(self._error)
                if time.monotonic() > deadline:
                    raise LoopError(self._overdue())
                time.sleep(pause)
                pause = min(2 * pause, 0.1)
                come = self._store.add(key, 0)
        finally:
            self._meeting = False

    # ---- the watching thread ---------------------------------------------------------------------------------------

    def _watch(self) -> None:
        with suppress(RuntimeError, ValueError):  # the store or the group is gone
            while not self._stopping.wait(self._patience.tick):
                self._answer()
                since, call = self._since, self._calls
                if since is None or time.monotonic() - since < self._patience.asks or self._error is not None:
                    continue
                found = self._look()
                if found is None or self._calls != call or self._since is None:
                    continue
                self._store.set("error", found)
                self._error = found
                if not self._meeting:
                    _end_process(found)

    def _answer(self) -> None:
        asked = self._store.add("asked", 0)
        if asked != self._answered:
            if self._store.check(["lost"]):
                if self._stopping.wait(self._patience.asks):  # the launcher of one machine ends all by then
                    return  # this process ends by itself, and may be telling why
                _end_process(f"{self._store.get('lost').decode()}; process {self._rank} ends with it.")
            self._answered = asked
            line = script_line(self._script)
            self._publish(Standing(asked, self._calls, self._call, issued_operations(), line))

    def _publish(self, standing: Standing) -> None:
        self._store.set(f"at/{self._rank}", standing.dump())

    def _look(self) -> str | None:
        """What is wrong with the others, as one message; None if nothing is, or nothing is known yet."""
        if self._store.check(["error"]):  # of a process that has found one, and ends or has ended
            return str(self._store.get("error").decode())
        question = self._store.add("asked", 1)
        time.sleep(1.5 * self._patience.tick)  # every other thread looks once
        late: dict[int, Standing | None] = {}
        for rank in range(self._world_size):
            if rank == self._rank:
                continue
            key = f"at/{rank}"
            standing = Standing.load(self._store.get(key)) if self._store.check([key]) else Standing()
            if standing.answers < question:
                late[rank] = None
            elif standing.calls < self._calls:
                if standing.gone:
                    return self._left(rank, standing)
                if standing.issued > self._issued_before:
                    return self._elsewhere(rank, standing)
                late[rank] = standing
            elif standing.calls == self._calls and standing.call != self._call:
                return self._different(rank, standing)
        self._warn_of(late)
        return None

    # ---- sentences -------------------------------------------------------------------------------------------------

    def _warn_of(self, late: dict[int, Standing | None]) -> None:
        waited = 0.0 if self._since is None else time.monotonic() - self._since
        if late:
            self._late = "; ".join(
                f"process {rank} does not answer"
                if standing is None
                else f"process {rank} is at {standing.line}, its last such call was {standing.last_call}"
                for rank, standing in late.items()
            )
        if not late or waited < self._next_warning:
            return
        self._next_warning = 2 * waited
        told = self._late
        _print(f"{self._here('has waited')} for {waited:.0f} s: {told}. It waits until the process group's time-out.")

    def _overdue(self) -> str:
        told = self._late or "other processes have not come"
        return (
            f"{self._here('has waited')} for {self._limit:.0f} s, the process group's time-out: {told}.\n"
            "Where a process may take that long, raise it: "
            "Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=…))])."
        )

    def _here(self, state: str = "is") -> str:
        return f"process {self._rank} {state} in {self._call}() ({script_line(self._script)})"

    def _different(self, rank: int, standing: Standing) -> str:
        line = "" if standing.gone else f" ({standing.line})"
        return (
            f"{self._here()}, but process {rank} is in {standing.call}(){line}.\n"
            "Both are collective: every process has to make the same calls in the same order."
        )

    def _elsewhere(self, rank: int, standing: Standing) -> str:
        fix = (
            "Every process has to take the same number of steps, and to come to the end."
            if self._call == "end_training"
            else f"{self._call}() is collective: call it on every process, not under "
            "`if accelerator.is_main_process:`. What one process alone may do, it does there by itself."
        )
        return (
            f"{self._here()}, but process {rank} did not come: it went on, and waits for this process at "
            f"{standing.line}.\n{fix}"
        )

    def _left(self, rank: int, standing: Standing) -> str:
        how = "failed" if standing.failed else "ended"
        return (
            f"{self._here()}, but process {rank} has {how}; its last such call was {standing.last_call}.\n"
            f"{self._call}() is collective: every process has to come to it."
        )


def _print(line: str) -> None:
    print(f"zero_plugin: {line}", file=sys.stderr, flush=True)  # noqa: T201 - on whichever process sees it


def _end_process(message: str) -> NoReturn:
    _print(f"error: {message}")
    sys.stdout.flush()
    os._exit(1)


# ---- this process' agreement ---------------------------------------------------------------------------------------

_agreement: Agreement | None = None
_watched_group: Any = None
_groups_watched = 0


def start_watching(patience: Patience | None = None) -> None:
    """Watch the calls of the default process group, if it has several processes and is not watched yet."""
    global _agreement, _watched_group, _groups_watched
    group = c10d._get_default_group()
    if group.size() == 1 or group is _watched_group:
        return
    end_watching()
    _groups_watched += 1  # groups may follow one another in the same store
    store = c10d.PrefixStore(f"zero_plugin/agreement/{_groups_watched}", c10d._get_default_store())
    patience = patience or Patience()
    _agreement = Agreement(store, dist.get_rank(), group.size(), patience, time_out(group))
    _watched_group = group
    atexit.unregister(_tell_end)
    atexit.register(_tell_end)


def time_out(group: Any) -> float:
    """Of the group's operations, in seconds; without end for a backend that does not tell."""
    device = torch.device(dist.get_backend_config(group).split(",")[0].split(":")[0])
    options = getattr(group._get_backend(device), "options", None)
    limit = getattr(options, "_timeout", None)
    return float("inf") if limit is None else float(limit.total_seconds())


def end_watching() -> None:
    """All processes have come to their end; nothing is left to agree on."""
    global _agreement, _watched_group
    if _agreement is not None:
        _agreement.stop()
    _agreement = _watched_group = None


def _tell_end() -> None:
    if _agreement is not None:
        _agreement.stop()
        _agreement.tell_end(failed=any(getattr(sys, name, None) for name in ("last_exc", "last_value")))


def exchange(word: str) -> list[str]:
    """Inside a `collective` call: what every process says there, by rank; of one process, its own word.

    Raises:
        LoopError: another process does not come to it.
    """
    return [word] if _agreement is None else _agreement.exchange(word)


def tell_loss(how: str) -> None:
    """Have the other processes end within seconds, whatever they wait in: this one ends, and `how`."""
    if _agreement is not None:
        _agreement.stop()
        _agreement.tell_loss(how)


def collective(name: str, *, meets: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator of a function that every process has to call.

    Args:
        name: what messages call it.
        meets: the processes wait for each other in the store first; for calls that are rare and long.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def agreed(*args: P.args, **kwargs: P.kwargs) -> R:
            agreement = _agreement
            if agreement is None or not dist.is_initialized() or not agreement.enter(name, meets=meets):
                return function(*args, **kwargs)
            try:
                return function(*args, **kwargs)
            except RuntimeError as error:  # backends raise one when they are given different operations
                agreement.explain(error)
                raise
            finally:
                agreement.leave()

        return agreed

    return decorate
