"""Writes a checkpoint behind the training, in a thread."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from threading import Event

from zero_plugin.checkpoint.peers import GlooPeers, Meeting
from zero_plugin.checkpoint.save import OpenCheckpoint
from zero_plugin.checkpoint.snapshot import Snapshot
from zero_plugin.checkpoint.together import SCRIPT, Peers, all_or_none, describe_error
from zero_plugin.errors import CheckpointError
from zero_plugin.strategies.base import Session
from zero_plugin.strategies.fragments import Fragment

__all__ = ["BackgroundWriter"]


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
        self._meeting: Meeting | None = None  # of a copy that is not being written yet
        self._peers: GlooPeers | None = None  # kept: connecting many takes time, and leaves names in the store

    def copy(self, opened: OpenCheckpoint, sessions: Sequence[Session]) -> list[list[Fragment]] | None:
        """What `Snapshot.take` copies; None, with a line that says so, where it does not fit.

        Raises:
            CheckpointError: on every process, where one cannot copy; nothing of `opened` is left.
        """
        self._meeting = Meeting.of_all_processes() if self._peers is None else None
        try:
            copies = self.memory.take(opened, sessions)
        except BaseException:
            self._abandon(opened)
            raise
        if isinstance(copies, str):
            self._say(f"save_state(asynchronous=True): {copies}. It is written before training goes on.")
            return None
        self._held = sessions
        return copies

    def start(self, opened: OpenCheckpoint, write: Callable[[Peers], None]) -> None:
        """Write a checkpoint; nothing is being written.

        Args:
            opened: the checkpoint, copied.
            write: called in another thread; it reaches the other processes by the `Peers` that it gets.
        """
        assert self._running is None, "one at a time"
        copied = Event()
        try:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(1, "zero_plugin save")
            if self._peers is None:
                atexit.register(self._disconnect)  # of a script that fails; its threads end before that
            for session in self._held:
                session.before_change = partial(self._let_go, copied)
            self._running = opened.target, self._threads.submit(self._run, opened, copied, self._meeting, write)
            if self._meeting is not None:
                self._meeting.announce(coming=True)
        except BaseException:
            self._abandon(opened)
            raise

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

    def wait_for_writing(self) -> None:
        """Wait until the thread has written what it can, whatever comes of it; not collective."""
        if self._running is not None:
            wait([self._running[1]])

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

    def forget(self) -> None:
        """The script has dropped what saves by this: give memory back, once nothing is being written. Not collective.

        A save that is running is waited for, and its failure told, by `close`.
        """
        if self._running is None:
            self._release()
        else:
            self._running[1].add_done_callback(lambda _: self._release())

    def _release(self) -> None:
        self._let_go()
        self.memory.release()

    def _let_go(self, copied: Event | None = None) -> None:
        """Let the sessions change what was copied, once it is."""
        if copied is not None:
            copied.wait()
        for session in self._held:
            session.before_change = None
        self._held = ()

    def _abandon(self, opened: OpenCheckpoint) -> None:
        """What is begun in the script's thread ends before another thread has it."""
        self._let_go()
        opened.discard(SCRIPT)
        if self._meeting is not None:
            self._meeting.announce(coming=False)

    def _disconnect(self) -> None:
        atexit.unregister(self._disconnect)
        if self._peers is not None:
            self._peers.close()
            self._peers = None

    def _run(
        self,
        opened: OpenCheckpoint,
        copied: Event,
        meeting: Meeting | None,
        write: Callable[[Peers], None],
    ) -> None:
        try:
            self.memory.finish()
            copied.set()
            if meeting is not None:
                self._peers = meeting.connect()
            assert self._peers is not None, "connected before, or now"
            all_or_none(self.memory.check, self._peers)
            write(self._peers)
        except Exception as error:
            opened.discard(SCRIPT)  # where it could not even connect
            message = f"saving {opened.target} in the background: {describe_error(error)}"
            self._say(f"{message}\nThe next save_state(), load_state() or end_training() raises this.")
            raise CheckpointError(message) from error
