"""Saves in the background: copies the checkpoint's contents, and writes the copy in a thread with its own group.

Only an optimizer's step changes the optimizer's states and its own copy of the weights. If they are in CPU memory, the
thread copies them during the following forwards and backwards, and the next step waits for the copy. The module's own
tensors are copied immediately: a script may write to them at any time (to swap in averaged weights, for example), and
a forward may write to the buffers.
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

_LONGEST_SECONDS: Final = 86400.0  # limit for waiting for another process, if the training's group has no timeout
_CONNECT: Final = timedelta(seconds=60)
_CHUNK_BYTES: Final = 2**26  # a power of two: torch rounds pinned memory up to one
_ALIGNMENT: Final = 64  # bytes, of each fragment in a chunk, for vector instructions
_LEFT_FREE: Final = 0.1  # share of the available memory: the training and files not yet on the disk need memory too
_numbers: Final = count()  # one per group: each group needs its own names in the store


class GlooPeers:
    """The `Peers` of a background thread, over a separate gloo group. All processes create it together.

    torch does not register this group. So its operations are never mistaken for the training's, and it ends with its
    last reference, independently of the training's group.

    Args:
        store: the store through which the processes connect; None for one process.
        rank: this process's rank.
        world_size: the number of processes.
        limit: how long a process waits for another one in the group.
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
        """Connect the processes through the store of the training's group. Collective."""
        number = next(_numbers)
        if not dist.is_initialized():
            return cls(None, 0, 1, timedelta())
        group: Any = dist.group.WORLD
        store = c10d.PrefixStore(f"zero_plugin/saving/{number}", c10d._get_default_store())
        limit = timedelta(seconds=min(time_out(group), _LONGEST_SECONDS))
        return cls(store, group.rank(), group.size(), limit)

    def gather(self, text: str | None) -> list[str | None]:
        """Return the texts of all processes, process 0's first.

        Raises:
            CheckpointError: another process was interrupted or has ended.
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
        """End the group. A process that exits with an open group may abort."""
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
    """A pending copy of `source` into `target`. It is valid only while `source` has this version."""

    name: str
    source: Tensor
    target: Tensor
    version: int


class Snapshot:
    """CPU memory for one copy of this process's part of a checkpoint.

    The memory is reused for the next copy: filling new memory, which the system provides page by page, is seven times
    slower. Tensors from a GPU are copied into pinned memory.
    """

    def __init__(self) -> None:
        self._chunks: dict[bool, list[Tensor]] = {False: [], True: []}  # pinned or not
        self._filled: dict[bool, int] = {False: 0, True: 0}  # bytes
        self._later: list[_Later] = []

    def take(self, opened: OpenCheckpoint, sessions: Sequence[Session]) -> list[list[Fragment]] | str:
        """Copy everything that `opened` still needs from the training. Collective.

        The copy overwrites the previous one. `finish` completes it, before the next step of an optimizer.

        Args:
            opened: the checkpoint.
            sessions: the sessions of its models.

        Returns:
            Each model's fragments, or a sentence that says why the copy does not fit into a machine's memory.

        Raises:
            CheckpointError: on every process, if one process cannot copy.
        """
        sentence = _lack_of_memory(all_or_none(lambda: self._missing_bytes(opened, sessions)))
        return sentence or all_or_none(lambda: self._copy(opened, sessions))

    @torch.inference_mode()  # without it, torch refuses to write to tensors that were created in inference mode
    def finish(self) -> None:
        """Make the pending copies, in any thread.

        Raises:
            CheckpointError: a source has changed since `take`.
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
        """Drop the memory. A copy in use stays until it is written."""
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
        # If `reshape` inside `part_to_write` had to copy, the values are already safe from later changes.
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
        """Return the next free memory of one chunk, for `count` elements or as many as fit."""
        chunks, filled = self._chunks[pinned], self._filled[pinned]
        index, offset = divmod(filled, _CHUNK_BYTES)
        if index == len(chunks):
            chunks.append(torch.empty(_CHUNK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=pinned))
        taken = min(count * dtype.itemsize, _CHUNK_BYTES - offset)
        self._filled[pinned] += -(-taken // _ALIGNMENT) * _ALIGNMENT
        return chunks[index][offset : offset + taken].view(dtype)


def _storage(fragment: Fragment) -> int:
    """Return the address of a fragment's storage."""
    return fragment.values.untyped_storage().data_ptr()


def _lack_of_memory(needed_bytes: int) -> str | None:
    """Return a sentence if a machine lacks memory for its processes' copies. Equal on all processes. Collective."""
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
    """A thread that writes one checkpoint at a time while the script continues. The process's exit waits for it.

    All calls are collective, from the script's thread.

    Args:
        place: the folder that the run has claimed for its checkpoints.

    Attributes:
        memory: the memory for the copy that is written.
        running: the checkpoint that is being written, if any.
    """

    def __init__(self, place: ClaimedPlace) -> None:
        self.memory = Snapshot()
        self._place = place
        self._threads: ThreadPoolExecutor | None = None
        self.running: tuple[Path, Future[None]] | None = None
        self._held: Sequence[Session] = ()  # sessions whose states are being copied
        self._peers: GlooPeers | None = None  # reused: each new group takes time and leaves names in the store

    def start(self, opened: OpenCheckpoint, sessions: Sequence[Session]) -> bool:
        """Copy a checkpoint's contents, then write the checkpoint and rotate in another thread.

        Call this only while no other checkpoint is being written.

        Args:
            opened: the checkpoint.
            sessions: the sessions of its models.

        Returns:
            False, with a log line, if the copy does not fit into memory. The caller must then write `opened` itself.

        Raises:
            CheckpointError: on every process, if one process cannot copy; nothing of `opened` is left.
        """
        assert self.running is None, "one at a time"
        copied = Event()
        try:
            if self._peers is None:
                self._peers = all_or_none(GlooPeers.connect)  # if one process fails, the others time out soon
                atexit.register(self._disconnect_at_exit)
            copies = self.memory.take(opened, sessions)
            if isinstance(copies, str):
                announce(f"save_state(asynchronous=True): {copies}. It is written before training continues.")
                return False
            if self._threads is None:
                self._threads = ThreadPoolExecutor(1, "zero_plugin save")
            self._held = sessions
            for session in sessions:
                session.before_change = partial(self._let_go, copied)
            run = self._threads.submit(self._run, opened, copies, copied, self._peers)
            self.running = opened.target, run
        except BaseException:  # no thread has `opened` yet; closing the group makes the other processes' threads fail
            self._let_go()
            opened.discard(SCRIPT)
            self._disconnect()
            raise
        return True

    def wait(self) -> Path | None:
        """Wait until nothing is being written. Return the checkpoint that was being written, if any.

        Raises:
            CheckpointError: on every process, once: the checkpoint could not be written.
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
        """Wait until the thread ends, with or without an error. Not collective."""
        if self.running is not None:
            wait([self.running[1]])

    def close(self) -> None:
        """Wait, then release thread, process group and memory.

        Raises:
            CheckpointError: see `wait`.
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
        """Release the claimed place and the memory as soon as nothing is being written. Not collective.

        Called when the script has dropped its `Accelerator`. `close` raises the error of a running save.
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
        """Wait until the states are copied, then let the sessions change them again."""
        if copied is not None:
            copied.wait()
        for session in self._held:
            session.before_change = None
        self._held = ()

    def _disconnect_at_exit(self) -> None:
        """Wait for the writing and disconnect when the process exits, also if the script fails."""
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
            opened.discard(SCRIPT)  # if the error came before `write`, which discards the draft itself
            message = f"saving {opened.target} in the background: {describe_error(error)}"
            announce(f"{message}\nThe next save_state(), load_state() or end_training() raises this.")
            failure = CheckpointError(message)
            failure.lost_peer = isinstance(error, ZeroPluginError) and error.lost_peer
            raise failure from error
