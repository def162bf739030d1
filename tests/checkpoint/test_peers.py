"""Background threads reach each other without the training's process group."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore

from zero_plugin.checkpoint.background import GlooPeers
from zero_plugin.distributed.collectives import all_or_none
from zero_plugin.errors import CheckpointError, DamagedError

LIMIT = timedelta(seconds=20)


def test_processes_agree() -> None:
    """Texts of any length, or none, reach all processes. A step that fails on one fails alike on all."""
    store = HashStore()

    def work(rank: int) -> None:
        peers = GlooPeers(store, rank, 3, LIMIT)
        assert peers.is_main == (rank == 0)
        assert peers.gather(None if rank == 1 else "né" * rank) == ["", None, "néné"]

        def fail() -> int:
            if rank == 2:
                raise RuntimeError("no disk")
            return rank

        assert all_or_none(lambda: rank, peers) == rank
        with pytest.raises(RuntimeError if rank == 2 else CheckpointError, match="no disk"):
            all_or_none(fail, peers)

        def find() -> None:
            raise DamagedError("zeros") if rank == 1 else OSError(5, "broken")

        with pytest.raises(DamagedError, match=r"^(process 1: )?zeros$"):
            all_or_none(find, peers)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))


def test_one_that_has_gone_is_not_waited_for() -> None:
    """If a process has ended, the others' calls fail immediately and say why."""
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        here, there = pool.map(lambda rank: GlooPeers(store, rank, 2, LIMIT), range(2))
    del there
    started = time.monotonic()
    with pytest.raises(CheckpointError, match="another process was interrupted or has ended"):
        here.gather("is anybody there?")
    assert time.monotonic() - started < LIMIT.total_seconds() / 2
