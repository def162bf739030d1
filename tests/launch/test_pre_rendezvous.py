"""Machines that meet: if any of them is slow or gone at any step, all end in the same way."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore

from zero_plugin.errors import LaunchError
from zero_plugin.launch.rendezvous import meet_machines
from zero_plugin.launch.spec import Rendezvous

pytestmark = pytest.mark.timeout(120)

STEPS = range(10)  # a machine's own calls to the store; a repeated look is none
LATE_S = 0.4  # several looks of the others
_machine = threading.local()  # this thread's machine, and its steps
_looks_since_death: Counter[str] = Counter()  # keyed by meeting


class Killed(BaseException):
    """The silent end of a machine."""


class WatchedStore:
    """Separates meetings in one store. Before one of its steps a machine may be late, or be killed."""

    def __init__(self, prefix: str, store: Any) -> None:
        self._store = PrefixStore(f"{_machine.meeting}/{prefix}", store)

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if (name, str(arguments)) not in _machine.steps:
                _machine.steps.append((name, str(arguments)))
                self._hold_up()
            return getattr(self._store, name)(*arguments)

        return call

    def _hold_up(self) -> None:
        if len(_machine.steps) - 1 != _machine.held_up_at:
            return
        if _machine.dies:
            _looks_since_death[_machine.meeting] = 1
            raise Killed
        time.sleep(LATE_S)


def seconds_since_death() -> float:
    """Return a machine's clock, which moves only with each look at it after another machine was killed."""
    if looks := _looks_since_death[_machine.meeting]:
        _looks_since_death[_machine.meeting] += 1
    return 0.3 * looks


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Create a meeting point. A server listens there, but the machines share this process's store without a network."""
    shared = HashStore()
    monkeypatch.setattr("zero_plugin.launch.rendezvous.TCPStore", lambda *_, **__: shared)
    monkeypatch.setattr("zero_plugin.launch.rendezvous.PrefixStore", WatchedStore)
    monkeypatch.setattr("zero_plugin.launch.rendezvous.listening_socket", lambda *_: SimpleNamespace(detach=lambda: -1))
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def meet(meeting: str, endpoint: str, machine: tuple[int, int], held_up_at: int, dies: bool) -> str:
    """Meet as one machine, and return its end: "met", "killed", or the error."""
    _machine.meeting, _machine.steps, _machine.held_up_at, _machine.dies = meeting, [], held_up_at, dies
    rank, machines = machine
    waits = Rendezvous("static", endpoint, "", {"rank": rank, "timeout": 1.5 if dies else 60})
    try:
        meet_machines(waits, machines)
    except LaunchError as error:
        return str(error)
    except Killed:
        return "killed"
    return "met"


def hold_up_each(endpoint: str, machines: list[tuple[int, int]], *, dies: bool = False) -> list[list[str]]:
    """Return how meetings of `(rank, count)` end. In each, another machine is delayed at another step.

    All run in parallel.
    """
    cases = list(itertools.product(range(len(machines)), STEPS))
    with ThreadPoolExecutor(len(cases) * len(machines)) as pool:
        meetings = [
            [
                pool.submit(meet, f"{held_up}/{step}", endpoint, machine, step if held_up == number else -1, dies)
                for number, machine in enumerate(machines)
            ]
            for held_up, step in cases
        ]
        return [[end.result() for end in meeting] for meeting in meetings]


def test_all_machines_of_a_run_meet(endpoint: str) -> None:
    """They meet however late one of them is at any step."""
    assert {tuple(ends) for ends in hold_up_each(endpoint, [(0, 2), (1, 2)])} == {("met", "met")}


@pytest.mark.parametrize(
    ("machines", "told"),
    [([(0, 2), (0, 2)], "two machines have the number 0"), ([(0, 2), (1, 3)], "the machines count differently")],
)
def test_no_machine_goes_on_where_another_finds_an_error(
    machines: list[tuple[int, int]], told: str, endpoint: str
) -> None:
    """Machine 0 once continued and waited in torch, since its number was visible before the counts were compared."""
    for ends in hold_up_each(endpoint, machines):
        assert all(told in end for end in ends), ends


def test_one_machine_too_many(endpoint: str) -> None:
    """Two machines have the number 1: no machine continues, or only machine 0 and the first of them."""
    for ends in hold_up_each(endpoint, [(0, 2), (1, 2), (1, 2)]):
        refused = ["two machines have the number 1" in end for end in ends]
        assert sum(refused) == 3 or (sum(refused) == 1 and ends.count("met") == 2), ends


def test_a_machine_that_is_killed_while_they_meet(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one ends within its time and names it. It continues only if the lost one had seen both."""
    monkeypatch.setattr("zero_plugin.launch.rendezvous._FAREWELL_S", 0.2)
    clock = SimpleNamespace(monotonic=seconds_since_death, sleep=time.sleep)
    monkeypatch.setattr("zero_plugin.launch.rendezvous.time", clock)
    told = {"came, but does not answer any more": 0, "did not come": 0, "met": 0}
    for ends in hold_up_each(endpoint, [(0, 2), (1, 2)], dies=True):
        lost = ends.index("killed")
        how = next(how for how in told if how in ends[1 - lost])
        assert how == "met" or f"machine {lost} {how}, 2 s after machine {1 - lost} of 2 came" in ends[1 - lost]
        told[how] += 1
    assert all(told.values()), told
