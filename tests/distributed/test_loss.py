"""A lost process ends the others, unless they are already ending."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch.distributed as dist

from zero_plugin.distributed import collective_check as agreement
from zero_plugin.distributed.collective_check import CollectiveCheck, Patience
from zero_plugin.distributed.mismatch import Call, Finding, find_mismatch
from zero_plugin.distributed.rank_progress import RankProgress, begin_progress, publish, read_progress


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the exit codes that processes were ended with."""
    ended: list[str] = []
    monkeypatch.setattr(agreement, "end_process", ended.append)
    return ended


@pytest.fixture
def lose(ended: list[str]) -> Callable[[float], CollectiveCheck]:
    """Simulate process 0 when it hears that process 1 is lost. The launcher gets the given seconds."""

    def lose(seconds: float) -> CollectiveCheck:
        store = dist.HashStore()
        watching = CollectiveCheck(store, 0, 2, Patience(tick=0.01, asks=seconds))
        store.set("end", json.dumps(Finding("process 1 ran out of memory")))
        time.sleep(0.3)
        return watching

    return lose


def test_it_ends_with_the_lost_one(lose: Callable[[float], CollectiveCheck], ended: list[str]) -> None:
    """The process ends with the lost one's message if no launcher did so in time."""
    watching, deadline = lose(0.05), time.monotonic() + 10
    while not ended and time.monotonic() < deadline:
        time.sleep(0.01)
    watching.stop()
    assert ended == ["process 1 ran out of memory; process 0 ends with it."]


def test_one_that_ends_by_itself_is_left_to_it(lose: Callable[[float], CollectiveCheck], ended: list[str]) -> None:
    """A process that is already ending is left alone: its watch stopped meanwhile, and it may be writing a report."""
    lose(60).stop()
    assert ended == []


def test_who_holds_the_store_ends_after_the_others_have_read_why(ended: list[str]) -> None:
    """The store's holder ends two ticks late, since the others poll the reason from the store once a tick."""
    store = dist.HashStore()
    watching = CollectiveCheck(store, 0, 2, Patience(tick=0.3, asks=0.1))
    publish(store, 1, replace(begin_progress(), passes=5))
    watching.enter("gather", waits_for_all=False)
    told, deadline = 0.0, time.monotonic() + 20
    while not ended and time.monotonic() < deadline:
        if not told and store.check(["end"]):
            told = time.monotonic()
        time.sleep(0.01)
    took = time.monotonic() - told
    watching.stop()
    assert "process 1 did not come: it continued" in ended[0]
    assert took > 0.5


class Ended:
    """A store whose process has ended."""

    def set(self, *_: object) -> None:
        raise RuntimeError("Connection reset by peer")

    check = set  # noqa: A003


@pytest.mark.parametrize("has_said_why", [True, False])
def test_what_is_said_of_a_lost_process(has_said_why: bool, ended: list[str]) -> None:
    """The message gives the published reason. If the store is gone, it gives no place as old as the run."""
    store = dist.HashStore()
    watching = CollectiveCheck(store, 1, 2, Patience(tick=0.1, asks=60))
    publish(store, 0, replace(begin_progress(), line="train.py:34", gone=True))
    time.sleep(0.5)
    lost = "process 0 has ended, and process 1 failed by that"
    assert watching.describe_lost(0.1) == f"{lost}: process 0 was last seen at train.py:34."
    if has_said_why:
        store.set("end", json.dumps(Finding("process 0 is in end_training(), after sys.exit(3)")))
        time.sleep(0.5)
    watching._store = Ended()
    assert watching.describe_lost(0.1) == (
        "process 0 is in end_training(), after sys.exit(3)"
        if has_said_why
        else "process 1 failed, and process 0, which holds the store, has ended."
    )
    watching.stop()
    assert ended == []


def test_the_holder_of_the_store_is_named_when_another_survivor_has_ended_before(ended: list[str]) -> None:
    """If process 0 dies and process 2 follows, process 1 names the store's holder, since their order is unknown."""
    store = dist.HashStore()
    watching = CollectiveCheck(store, 1, 3, Patience(tick=0.1, asks=60))
    for rank in (0, 2):
        publish(store, rank, replace(begin_progress(), pid=ended_process()))
    deadline = time.monotonic() + 20
    while len(watching._others) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    watching._store = Ended()
    assert watching.describe_lost(0.1) == (
        "process 1 failed, and process 0, which holds the store, has ended. On this machine process 2 has ended too."
    )
    watching.stop()
    assert ended == []


def ended_process() -> int:
    """Return the id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_process_is_known_from_its_beginning() -> None:
    """A process that ended before its first tick is detected by its published process id."""
    store = dist.HashStore()
    watching = CollectiveCheck(store, 1, 2, Patience(tick=60))
    try:
        assert read_progress(store, [1])[1].pid == os.getpid()
    finally:
        watching.stop()


def test_one_that_ended_without_a_word_is_the_cause() -> None:
    """The process that ended silently is named as the cause, not one that failed, maybe as a consequence."""
    call = Call(number=5, name="gather", passes=0)
    failed = RankProgress(calls=4, left=4, gone=True, failed=True)
    found = find_mismatch(call, {1: failed, 2: replace(failed, failed=False)})
    assert found is not None
    assert found.text.startswith("process 2 has ended")
