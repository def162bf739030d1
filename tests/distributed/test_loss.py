"""A process that is lost takes the others with it, unless they are ending by themselves."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from zero_plugin.distributed import collective_check as agreement
from zero_plugin.distributed.collective_check import CollectiveCheck, Finding, Patience


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What processes were ended with."""
    ended: list[str] = []
    monkeypatch.setattr(agreement, "end_process", ended.append)
    return ended


@pytest.fixture
def lose(ended: list[str]) -> Callable[[float], CollectiveCheck]:
    """Process 0, which hears that process 1 is lost and gives the launcher so many seconds."""

    def lose(seconds: float) -> CollectiveCheck:
        store = dist.HashStore()
        watching = CollectiveCheck(store, 0, 2, Patience(tick=0.01, asks=seconds))
        store.set("end", json.dumps(Finding("process 1 ran out of memory")))
        time.sleep(0.3)
        return watching

    return lose


def test_it_ends_with_the_lost_one(lose: Callable[[float], CollectiveCheck], ended: list[str]) -> None:
    """Where no launcher did so in time, with what the lost one has said."""
    watching, deadline = lose(0.05), time.monotonic() + 10
    while not ended and time.monotonic() < deadline:
        time.sleep(0.01)
    watching.stop()
    assert ended == ["process 1 ran out of memory; process 0 ends with it."]


def test_one_that_ends_by_itself_is_left_to_it(lose: Callable[[float], CollectiveCheck], ended: list[str]) -> None:
    """Its watch was stopped while it waited: it may be in the midst of its own report."""
    lose(60).stop()
    assert ended == []
