"""Writes a checkpoint behind the training: a thread, and a process group of its own."""

from __future__ import annotations

import atexit
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from zero_plugin.agreement import time_out
from zero_plugin.checkpoint.save import OpenCheckpoint
from zero_plugin.checkpoint.snapshot import Snapshot
from zero_plugin.checkpoint.together import SCRIPT, Peers, all_or_none, describe_error
from zero_plugin.errors import CheckpointError
from zero_plugin.strategies.base import Session
from zero_plugin.strategies.fragments import Fragment

__all__ = ["BackgroundWriter", "GlooPeers"]

_LONGEST_SECONDS: Final = 86400.0  # that a process waits for another, where the training's group has no time-out
_CONNECT: Final = timedelta(seconds=60)
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


class BackgroundWriter:
    """Does one thing at a time while the script goes on. The end of the process waits for it.

    All calls are collective, from the script's thread.

    Args:
        say: prints a line, on the main process.

    Attributes:
        memory: for what it writes.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.memory = Snapshot()
        self._say = say
        self._threads: ThreadPoolExecutor | None = None
        self._running: tuple[Path, Future[None]] | None = None
        self._held: Sequence[Session] = ()  # whose states are being copied
        self._peers: GlooPeers | None = None  # kept: connecting many takes time, and leaves names in the store

    def copy(self, opened: OpenCheckpoint, sessions: Sequence[Session]) -> list[list[Fragment]] | None:
        """What `Snapshot.take` copies; None, with a line that says so, where it does not fit.

        Raises:
            CheckpointError: on every process, where one cannot copy; nothing of `opened` is left.
        """
        try:
            copies = self.memory.take(opened, sessions)
        except BaseException:
            opened.discard(SCRIPT)
            raise
        if isinstance(copies, str):
            self._say(f"save_state(asynchronous=True): {copies}. It is written before training goes on.")
            return None
        self._held = sessions
        return copies

    def start(self, opened: OpenCheckpoint, write: Callable[[Peers], None]) -> None:
        """Write a checkpoint; nothing is being written.

        Args:
            opened: the checkpoint.
            write: called in another thread; it reaches the other processes by the `Peers` that it gets.
        """
        assert self._running is None, "one at a time"
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "zero_plugin save")
        connect = None
        if self._peers is None:
            connect = _connection()
            atexit.register(self._disconnect)  # of a script that fails; its threads end before that
        copied = Event()
        try:
            self._running = opened.target, self._threads.submit(self._run, opened, copied, connect, write)
        except BaseException:
            opened.discard(SCRIPT)
            raise
        for session in self._held:
            session.before_change = partial(self._let_go, copied)

    def wait(self) -> Path | None:
        """Wait until nothing is being written; the checkpoint that was, if any.

        Raises:
            CheckpointError: on every process: it could not be written; it is said once.
        """
        if self._running is None:
            return None
        target, future = self._running
        wait([future])
        self._running = None
        self._let_go()
        try:
            all_or_none(future.result)
        except Exception:
            self._disconnect()  # the group may be broken
            raise
        return target

    def close(self) -> None:
        """Wait, and let go of thread, process group and memory.

        Raises:
            CheckpointError: as `wait`.
        """
        try:
            self.wait()
        finally:
            if self._threads is not None:
                self._threads.shutdown()
            self._threads = None
            self._disconnect()
            self.memory.release()

    def _let_go(self, copied: Event | None = None) -> None:
        """Let the sessions change what was copied, once it is."""
        if copied is not None:
            copied.wait()
        for session in self._held:
            session.before_change = None
        self._held = ()

    def _disconnect(self) -> None:
        atexit.unregister(self._disconnect)
        if self._peers is not None:
            self._peers.close()
            self._peers = None

    def _run(
        self,
        opened: OpenCheckpoint,
        copied: Event,
        connect: Callable[[], GlooPeers] | None,
        write: Callable[[Peers], None],
    ) -> None:
        try:
            self.memory.finish()
            copied.set()
            if connect is not None:
                self._peers = connect()
            assert self._peers is not None, "connected before, or now"
            all_or_none(self.memory.check, self._peers)
            write(self._peers)
        except Exception as error:
            opened.discard(SCRIPT)  # where it could not even connect
            message = f"saving {opened.target} in the background: {describe_error(error)}"
            self._say(f"{message}\nThe next save_state(), load_state() or end_training() raises this.")
            raise CheckpointError(message) from error


def _connection() -> Callable[[], GlooPeers]:
    """How a thread gets to the other processes; it waits there until theirs do."""
    if not dist.is_initialized():
        return partial(GlooPeers, None, 0, 1, timedelta())
    group = c10d._get_default_group()
    store = c10d.PrefixStore(f"zero_plugin/saving/{next(_numbers)}", c10d._get_default_store())
    limit = timedelta(seconds=min(time_out(group), _LONGEST_SECONDS))
    return partial(GlooPeers, store, group.rank(), group.size(), limit)
