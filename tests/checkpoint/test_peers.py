"""Threads beside the script's reach each other, without the training's group."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from zero_plugin.checkpoint.background import GlooPeers
from zero_plugin.distributed.collectives import all_or_none
from zero_plugin.errors import CheckpointError

LIMIT = timedelta(seconds=20)


def test_processes_agree() -> None:
    """Texts of any length, none, and sums come to all; a step that fails on one fails on all."""
    store = HashStore()

    def work(rank: int) -> None:
        peers = GlooPeers(store, rank, 3, LIMIT)
        assert peers.is_main == (rank == 0)
        assert peers.gather(None if rank == 1 else "né" * rank) == ["", None, "néné"]
        assert peers.sum(torch.tensor([[rank, 2**62]])).tolist() == [[3, 3 * 2**62 - 2**64]]

        def fail() -> int:
            if rank == 2:
                raise RuntimeError("no disk")
            return rank

        assert all_or_none(lambda: rank, peers) == rank
        with pytest.raises(RuntimeError if rank == 2 else CheckpointError, match="no disk"):
            all_or_none(fail, peers)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))


def test_one_that_has_gone_is_not_waited_for() -> None:
    """The others' calls fail at once, and say why."""
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        here, there = pool.map(lambda rank: GlooPeers(store, rank, 2, LIMIT), range(2))
    del there
    started = time.monotonic()
    with pytest.raises(CheckpointError, match="another process was interrupted or has ended"):
        here.gather("is anybody there?")
    assert time.monotonic() - started < LIMIT.total_seconds() / 2
