"""The processes' threads that save reach each other: a process group of their own, and how they get to it."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from itertools import count
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from zero_plugin.agreement import time_out
from zero_plugin.errors import CheckpointError

__all__ = ["GlooPeers", "Meeting"]

_LONGEST_SECONDS: Final = 86400.0  # that a process waits for another, where the training's group has no time-out
_CONNECT: Final = timedelta(seconds=60)
_LOOK_S: Final = (0.01, 0.5)  # between two looks into the store, at first and at most: it may have many visitors
_COMING: Final = "coming"  # how many processes, in the store
_STAYING_AWAY: Final = "staying_away"
_numbers: Final = count()  # of groups: each needs its own names in the store


class GlooPeers:
    """`Peers` of a thread beside the script's, over a gloo group of its own.

    torch keeps no list of this group: nobody takes its operations for the training's, and it ends with its last
    reference, whatever becomes of the training's group.
    """

    def __init__(self, store: Any, rank: int, world_size: int, limit: timedelta) -> None:
        self.is_main = rank == 0
        self._world_size = world_size
        self._group: Any = None
        if world_size > 1:
            # All begin at once; and who waits in the store keeps it from answering this process' other threads.
            self._group = dist.ProcessGroupGloo(store, rank, world_size, min(limit, _CONNECT))
            self._group._set_default_timeout(limit)

    def gather(self, text: str | None) -> list[str | None]:
        """See `Peers.gather`."""
        if self._group is None:
            return [text]
        own = torch.frombuffer(bytearray(json.dumps(text).encode()), dtype=torch.uint8)
        sizes = self._gather_equal(torch.tensor([own.numel()]))
        padded = own.new_zeros(int(max(sizes)))
        padded[: own.numel()] = own
        texts = self._gather_equal(padded)
        return [json.loads(bytes(line[: int(size)].tolist())) for line, size in zip(texts, sizes, strict=True)]

    def sum(self, numbers: Tensor) -> Tensor:
        """See `Peers.sum`."""
        total = numbers.clone()
        if self._group is not None:
            self._group.allreduce([total]).wait()
        return total

    def close(self) -> None:
        """End the group: a process that still has one when it ends may abort."""
        self._group = None

    def _gather_equal(self, tensor: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self._world_size)]
        self._group.allgather([gathered], [tensor]).wait()
        return gathered


class Meeting:
    """How the threads get to their group: each process' script says whether its thread is going to come.

    A script that is interrupted in the middle of a save (Ctrl-C) may never start its thread. The others' need not wait
    for it then, and hold up the end of their processes.

    Args:
        store: where they meet; None for one process.
        rank: of this process.
        world_size: processes.
        limit: that a process waits for another in the group.
    """

    def __init__(self, store: Any, rank: int, world_size: int, limit: timedelta) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._limit = limit

    @classmethod
    def of_all_processes(cls) -> Meeting:
        """The next one; every process makes as many."""
        number = next(_numbers)
        if not dist.is_initialized():
            return cls(None, 0, 1, timedelta())
        group = c10d._get_default_group()
        store = c10d.PrefixStore(f"zero_plugin/saving/{number}", c10d._get_default_store())
        limit = timedelta(seconds=min(time_out(group), _LONGEST_SECONDS))
        return cls(store, group.rank(), group.size(), limit)

    def announce(self, *, coming: bool) -> None:
        """Say whether this process' thread is going to come."""
        if self._store is not None:
            self._store.add(_COMING if coming else _STAYING_AWAY, 1)

    def connect(self) -> GlooPeers:
        """The other processes' threads, when all come.

        Raises:
            CheckpointError: one does not.
        """
        if self._store is not None:
            self._await_all()
        return GlooPeers(self._store, self._rank, self._world_size, self._limit)

    def _await_all(self) -> None:
        pause, longest = _LOOK_S
        deadline = time.monotonic() + _CONNECT.total_seconds()
        while (coming := self._store.add(_COMING, 0)) < self._world_size:
            if self._store.add(_STAYING_AWAY, 0):
                raise CheckpointError("another process was interrupted before it began to write.")
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{self._world_size - coming} of {self._world_size} processes have not begun to write within "
                    f"{_CONNECT.seconds} s."
                )
            time.sleep(pause)
            pause = min(2 * pause, longest)
