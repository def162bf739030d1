"""Saves beside the training: a copy of what the checkpoint holds, and a thread with a process group that writes it.

What only an optimizer's step changes (its states, and its own copy of the weights) and is in CPU memory is copied
behind the forwards and backwards that follow: the next step waits for it. What the module holds is copied at once: a
script may write to it at any time (averages of weights are swapped in so), and a forward to its buffers.
"""

from __future__ import annotations

import atexit
import json
import platform
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
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

from zero_plugin.checkpoint.locks import ClaimedPlace
from zero_plugin.checkpoint.save import OpenCheckpoint
from zero_plugin.checkpoint.tensor_files import described_fragments, placed_fragments, session_fragments
from zero_plugin.distributed import collectives
from zero_plugin.distributed.collective_check import time_out
from zero_plugin.distributed.collectives import SCRIPT, Peers, all_or_none, announce, describe_error
from zero_plugin.errors import CheckpointError, ZeroPluginError, of_lost_peer
from zero_plugin.machine.hardware import available_cpu_memory
from zero_plugin.strategies.base import Session
from zero_plugin.tensors.modules import Fragment

_LONGEST_SECONDS: Final = 86400.0  # that a process waits for another, where the training's group has no time-out
_CONNECT: Final = timedelta(seconds=60)
_CHUNK_BYTES: Final = 2**26  # a power of two: torch rounds pinned memory up to one
_ALIGNMENT: Final = 64  # of each fragment in a chunk, for vector instructions
_LEFT_FREE: Final = 0.1  # of what is available: training needs memory too, and so do the files that wait for the disk
_numbers: Final = count()  # of groups: each needs its own names in the store


class GlooPeers:
    """`Peers` of a thread beside the script's, over a gloo group of its own; all processes make it together.

    torch keeps no list of this group: nobody takes its operations for the training's, and it ends with its last
    reference, whatever becomes of the training's group.

    Args:
        store: where the processes find each other; None for one process.
        rank: of this process.
        world_size: processes.
        limit: that a process waits for another in the group.
    """

    def __init__(self, store: Any, rank: int, world_size: int, limit: timedelta) -> None:
        self.is_main = rank == 0
        self._world_size = world_size
        self._group: Any = None
        if world_size > 1:
            self._group = dist.ProcessGroupGloo(store, rank, world_size, min(limit, _CONNECT))
            self._group._set_default_timeout(limit)

    @classmethod
    def connect(cls) -> GlooPeers:
        """Over the store of the training's group. Collective."""
        number = next(_numbers)
        if not dist.is_initialized():
            return cls(None, 0, 1, timedelta())
        group: Any = dist.group.WORLD
        store = c10d.PrefixStore(f"zero_plugin/saving/{number}", c10d._get_default_store())
        limit = timedelta(seconds=min(time_out(group), _LONGEST_SECONDS))
        return cls(store, group.rank(), group.size(), limit)

    def gather(self, text: str | None) -> list[str | None]:
        """Every process' text, process 0's first.

        Raises:
            CheckpointError: another process was interrupted, or has ended.
        """
        if self._world_size == 1:
            return [text]
        own = torch.frombuffer(bytearray(json.dumps(text).encode()), dtype=torch.uint8)
        sizes = self._gather_equal(torch.tensor([own.numel()]))
        padded = own.new_zeros(int(max(sizes)))
        padded[: own.numel()] = own
        texts = self._gather_equal(padded)
        return [json.loads(line[: int(size)].numpy().tobytes()) for line, size in zip(texts, sizes, strict=True)]

    def close(self) -> None:
        """End the group: a process that still has one when it ends may abort."""
        self._group = None

    def _gather_equal(self, tensor: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self._world_size)]
        try:
            self._group.allgather([gathered], [tensor]).wait()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            message = f"another process was interrupted or has ended ({reason})."
            raise of_lost_peer(CheckpointError(message)) from error
        return gathered


@dataclass(frozen=True, slots=True)
class _Later:
    """A copy that waits to be made: of `source`, while that has this version, into `target`."""

    name: str
    source: Tensor
    target: Tensor
    version: int


class Snapshot:
    """CPU memory that holds one copy of what this process writes of a checkpoint.

    It is kept from one copy to the next: memory that the system has to hand out anew, page by page, is filled seven
    times slower. What comes from a GPU goes into pinned memory.
    """

    def __init__(self) -> None:
        self._chunks: dict[bool, list[Tensor]] = {False: [], True: []}  # pinned or not
        self._filled: dict[bool, int] = {False: 0, True: 0}  # bytes
        self._later: list[_Later] = []

    def take(self, opened: OpenCheckpoint, sessions: Sequence[Session]) -> list[list[Fragment]] | str:
        """Copy all that `opened` still needs of the training. Collective.

        What the last copy held is overwritten. The copy is complete after `finish`, and before an optimizer steps.

        Args:
            opened: the checkpoint.
            sessions: of its models.

        Returns:
            Each model's fragments, or a sentence: why the copy does not fit the memory of some machine.

        Raises:
            CheckpointError: on every process, where one cannot copy.
        """
        sentence = _lack_of_memory(all_or_none(lambda: self._missing_bytes(opened, sessions)))
        return sentence or all_or_none(lambda: self._copy(opened, sessions))

    @torch.inference_mode()  # else what was made inside inference_mode could not be written to
    def finish(self) -> None:
        """Copy the rest, in any thread.

        Raises:
            CheckpointError: the copy is not what was there when it was begun.
        """
        later, self._later = self._later, []
        for copy in later:
            copy.target.copy_(copy.source)
            if copy.source._version != copy.version:
                raise CheckpointError(
                    f"the {copy.name} was changed while it was copied, after save_state(asynchronous=True) and before "
                    "the next optimizer.step().\nChange optimizer states before the save, or save without asynchronous."
                )

    def release(self) -> None:
        """Keep nothing; a copy that is in use stays until it is written."""
        for chunks in self._chunks.values():
            chunks.clear()

    def _missing_bytes(self, opened: OpenCheckpoint, sessions: Sequence[Session]) -> int:
        needed = sum(tree.size for tree in opened.trees.values())
        for session, layout in zip(sessions, opened.layouts, strict=True):
            for fragment in placed_fragments(described_fragments(session), layout):
                begin, end = fragment.written
                needed += (end - begin) * fragment.values.element_size()
        kept = _CHUNK_BYTES * sum(map(len, self._chunks.values()))
        return max(0, needed - kept)

    def _copy(self, opened: OpenCheckpoint, sessions: Sequence[Session]) -> list[list[Fragment]]:
        self._filled = dict.fromkeys(self._filled, 0)
        self._later = []
        opened.trees = {stem: tree.copy() for stem, tree in opened.trees.items()}
        copies: list[list[Fragment]] = []
        for session, layout in zip(sessions, opened.layouts, strict=True):
            held = {_storage(weight) for weight in session.weight_fragments()}
            copies.append([])
            for fragment in placed_fragments(session_fragments(session), layout):
                waits = session.states_stay and _storage(fragment) not in held
                copies[-1].extend(self._copy_fragment(fragment, waits=waits))
        if self._filled[True]:
            torch.cuda.synchronize()
        for pinned, chunks in self._chunks.items():
            del chunks[-(-self._filled[pinned] // _CHUNK_BYTES) :]
        return copies

    def _copy_fragment(self, fragment: Fragment, *, waits: bool) -> Iterable[Fragment]:
        flat = fragment.part_to_write()
        pinned = flat.device.type == "cuda"
        # What `reshape` had to copy is one of what was there by now.
        waits = waits and flat.device.type == "cpu" and flat.untyped_storage().data_ptr() == _storage(fragment)
        done = 0
        while done < flat.numel():
            target = self._memory_for(flat.numel() - done, flat.dtype, pinned)
            source = flat[done : done + target.numel()]
            if waits:
                self._later.append(_Later(f"{fragment.kind} of {fragment.name}", source, target, source._version))
            else:
                target.copy_(source, non_blocking=pinned)
            start = fragment.start + fragment.written[0] + done
            yield Fragment(fragment.kind, fragment.name, fragment.shape, start, target, (0, target.numel()))
            done += target.numel()

    def _memory_for(self, count: int, dtype: torch.dtype, pinned: bool) -> Tensor:
        """The next free memory of one chunk, for `count` elements or for as many as fit."""
        chunks, filled = self._chunks[pinned], self._filled[pinned]
        index, offset = divmod(filled, _CHUNK_BYTES)
        if index == len(chunks):
            chunks.append(torch.empty(_CHUNK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=pinned))
        taken = min(count * dtype.itemsize, _CHUNK_BYTES - offset)
        self._filled[pinned] += -(-taken // _ALIGNMENT) * _ALIGNMENT
        return chunks[index][offset : offset + taken].view(dtype)


def _storage(fragment: Fragment) -> int:
    """Where the memory that a fragment is in begins."""
    return fragment.values.untyped_storage().data_ptr()


def _lack_of_memory(needed_bytes: int) -> str | None:
    """A sentence if what the processes of some machine need is not available there; the same on all. Collective."""
    gathered = collectives.gather_values([platform.node(), needed_bytes, available_cpu_memory()])
    needed: dict[str, int] = defaultdict(int)
    available: dict[str, list[int]] = defaultdict(list)
    for machine, its_needed, its_available in gathered:
        needed[machine] += its_needed
        available[machine].append(its_available)
    for machine, total in needed.items():
        least = min(available[machine])
        if total > 0 and total > least * (1 - _LEFT_FREE):
            return f"the copy takes {total:,} bytes of memory on {machine}, where {least:,} bytes are available"
    return None


class BackgroundWriter:
    """Does one thing at a time while the script continues. The end of the process waits for it.

    All calls are collective, from the script's thread.

    Args:
        place: the place in which the run saves.

    Attributes:
        memory: for what it writes.
        running: the checkpoint that is being written, if any.
    """

    def __init__(self, place: ClaimedPlace) -> None:
        self.memory = Snapshot()
        self._place = place
        self._threads: ThreadPoolExecutor | None = None
        self.running: tuple[Path, Future[None]] | None = None
        self._held: Sequence[Session] = ()  # whose states are being copied
        self._peers: GlooPeers | None = None  # kept: connecting many takes time, and leaves names in the store

    def start(self, opened: OpenCheckpoint, sessions: Sequence[Session]) -> bool:
        """Copy what a checkpoint needs; write it, and rotate, in another thread. Nothing is being written.

        Args:
            opened: the checkpoint.
            sessions: of its models.

        Returns:
            False, which is logged, where the copy does not fit: `opened` is still to be written.

        Raises:
            CheckpointError: on every process, where one cannot copy; nothing of `opened` is left.
        """
        assert self.running is None, "one at a time"
        copied = Event()
        try:
            if self._peers is None:
                self._peers = all_or_none(GlooPeers.connect)  # where one fails, the others' time is over soon
                atexit.register(self._disconnect_at_exit)
            copies = self.memory.take(opened, sessions)
            if isinstance(copies, str):
                announce(f"save_state(asynchronous=True): {copies}. It is written before training goes on.")
                return False
            if self._threads is None:
                self._threads = ThreadPoolExecutor(1, "zero_plugin save")
            self._held = sessions
            for session in sessions:
                session.before_change = partial(self._let_go, copied)
            run = self._threads.submit(self._run, opened, copies, copied, self._peers)
            self.running = opened.target, run
        except BaseException:  # before another thread has it; the others' threads hear of it
            self._let_go()
            opened.discard(SCRIPT)
            self._disconnect()
            raise
        return True

    def wait(self) -> Path | None:
        """Wait until nothing is being written; the checkpoint that was, if any.

        Raises:
            CheckpointError: on every process: it could not be written; it is raised once.
        """
        if self.running is None:
            return None
        target, future = self.running
        wait([future])
        self.running = None
        self._let_go()
        try:
            all_or_none(future.result)
        except Exception:
            self._disconnect()  # the group may be broken
            raise
        return target

    def wait_for_writing(self) -> None:
        """Wait until the thread has written what it can, whatever comes of it; not collective."""
        if self.running is not None:
            wait([self.running[1]])

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
        """Give the claimed place and the memory back, once nothing is being written. Not collective.

        The script has dropped its `Accelerator`. `close` raises the failure of a save that is running.
        """

        def release(_: object = None) -> None:
            self._place.give_up()
            self._let_go()
            self.memory.release()

        if self.running is None:
            release()
        else:
            self.running[1].add_done_callback(release)

    def _let_go(self, copied: Event | None = None) -> None:
        """Let the sessions change what was copied, once it is."""
        if copied is not None:
            copied.wait()
        for session in self._held:
            session.before_change = None
        self._held = ()

    def _disconnect_at_exit(self) -> None:
        """Wait for the writing and disconnect at the exit of the process, also if the script fails."""
        self.wait_for_writing()
        self._disconnect()

    def _disconnect(self) -> None:
        atexit.unregister(self._disconnect_at_exit)
        if self._peers is not None:
            self._peers.close()
            self._peers = None

    def _run(self, opened: OpenCheckpoint, copies: list[list[Fragment]], copied: Event, peers: Peers) -> None:
        def finish() -> None:
            try:
                self.memory.finish()
            finally:
                copied.set()

        try:
            all_or_none(finish, peers)
            opened.write(copies, peers)
            opened.rotate(peers)
        except Exception as error:
            opened.discard(SCRIPT)  # where it did not come to `write`
            message = f"saving {opened.target} in the background: {describe_error(error)}"
            announce(f"{message}\nThe next save_state(), load_state() or end_training() raises this.")
            failure = CheckpointError(message)
            failure.lost_peer = isinstance(error, ZeroPluginError) and error.lost_peer
            raise failure from error
