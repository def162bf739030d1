"""The number of store requests of a run: few per process, for a thousand ranks as for two."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from zero_plugin.distributed import joining
from zero_plugin.distributed.collective_check import CollectiveCheck, Patience
from zero_plugin.distributed.mismatch import Call, Waiting
from zero_plugin.distributed.rank_progress import publish

WORLDS = (2, 8, 64, 256, pytest.param(1024, marks=pytest.mark.campaign))


class Counted:
    """An in-memory store that counts the requests of all ranks."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self._store = HashStore()
        self._turn = threading.Lock()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def request(*arguments: Any) -> Any:
            with self._turn:
                self.requests[name] += 1
            return getattr(self._store, name)(*arguments)

        return request

    @property
    def total(self) -> int:
        return sum(self.requests.values())


def run_ranks(world: int, rank_of: Callable[[int], None]) -> None:
    """Run each rank in a thread."""
    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.fixture(autouse=True)
def _at_an_address(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    threading.stack_size(1 << 20)
    yield
    threading.stack_size(0)


@pytest.mark.parametrize("world", WORLDS)
def test_joining(world: int) -> None:
    """Joining takes four requests a rank, and up to a thousand polls a second in total while the last rank is late."""
    store, began = Counted(), time.monotonic()

    def join(rank: int) -> None:
        if rank == world - 1:
            time.sleep(0.5)
        joining._refuse_strangers(store, rank, world)
        joining._wait_for_all(store, rank, world, timedelta(seconds=60))

    run_ranks(world, join)
    seconds = time.monotonic() - began
    looks = store.requests.pop("check")
    assert store.total == 3 * world + 1  # size, rank, count; and the last rank's notice that all have joined
    # The first poll of a process comes sooner, before it knows that it waits.
    assert looks <= (20 if world < 100 else 10) * world + joining.STORE_VISITS * seconds


@pytest.mark.parametrize("world", WORLDS)
def test_one_rank_is_missing(world: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Only one of all waiting ranks asks which ranks are missing, once per message."""
    monkeypatch.setattr(joining, "_FIRST_PAUSE", 0.3)
    monkeypatch.setattr(joining, "_missing", lambda store, world: store.get("asked") and "rank 0")
    store = Counted()
    store.set("asked", "yes")

    def join(rank: int) -> None:
        if rank == 0:
            time.sleep(1.5)
        joining._wait_for_all(store, rank, world, timedelta(seconds=60))

    run_ranks(world, join)
    messages = [r for r in caplog.records if "did not join yet" in r.message]
    assert 1 <= len(messages) == store.requests["get"] <= 4


@contextmanager
def checks(store: Counted, world: int) -> Iterator[list[CollectiveCheck]]:
    """Create one check per rank, with sleeping threads."""
    made = [CollectiveCheck(store, rank, world, Patience(tick=3600.0)) for rank in range(world)]
    try:
        yield made
    finally:
        for check in made:
            check._stopping.set()
        for check in made:
            check._thread.join()


@pytest.mark.parametrize("world", WORLDS)
def test_a_round_of_looks(world: int) -> None:
    """All ranks but one wait in a call. Each asks whether to poll, and one reads the others' places."""
    store = Counted()
    with checks(store, world) as made:
        for check in made:
            publish(store, check._rank, check._progress)
        before = store.total
        for check in made[1:]:
            call = check._now = Call(1, "gather", 0)
            assert not check._finds(Waiting(call, 60.0), check._patience.asks)
            check._now = None
        asked = store.total - before
    reads = 1 if store.requests["multi_get"] else world - 1
    assert asked <= (world - 1) + 1 + 2 * reads, store.requests


@pytest.mark.parametrize("world", WORLDS)
def test_meeting_in_a_call(world: int) -> None:
    """Each rank counts once if all come together. A late rank costs at most a thousand polls a second."""
    store, began = Counted(), time.monotonic()
    with checks(store, world) as made:

        def enter(rank: int) -> None:
            if rank == 0:
                time.sleep(1.0)
            made[rank].enter("save_state", waits_for_all=True)
            made[rank].leave(done=True)

        run_ranks(world, enter)
    seconds = time.monotonic() - began
    assert store.total <= (20 if world < 100 else 10) * world + joining.STORE_VISITS * seconds
