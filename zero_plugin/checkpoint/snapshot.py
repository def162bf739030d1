"""Copies what a checkpoint is to hold into host memory, so that training can go on while it is written.

What only an optimizer's step changes (its states, and its own copy of the weights) and lies in host memory is copied
behind the forwards and backwards that follow: the next step waits for it. What the module holds is copied at once: a
script may write to it at any time (averages of weights are swapped in so), and a forward to its buffers.
"""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from zero_plugin import collectives
from zero_plugin.checkpoint.save import OpenCheckpoint
from zero_plugin.checkpoint.session_tensors import described_fragments, placed_fragments, session_fragments
from zero_plugin.checkpoint.together import all_or_none
from zero_plugin.errors import CheckpointError
from zero_plugin.meter import memory_available_bytes
from zero_plugin.strategies.base import Session
from zero_plugin.strategies.fragments import Fragment

__all__ = ["Snapshot"]

_CHUNK_BYTES: Final = 2**26  # a power of two: torch rounds pinned memory up to one
_ALIGNMENT: Final = 64  # of each fragment in a chunk, for vector instructions
_LEFT_FREE: Final = 0.1  # of what is available: training needs memory too, and so do the files that wait for the disk


@dataclass(frozen=True, slots=True)
class _Later:
    """A copy that waits to be made: of `source`, while that has this version, into `room`."""

    named: str
    source: Tensor
    room: Tensor
    version: int


class Snapshot:
    """Host memory that holds one copy of what this process writes of a checkpoint.

    It is kept from one copy to the next: memory that the system has to hand out anew, page by page, is filled seven
    times slower. What comes from a GPU goes into pinned memory.
    """

    def __init__(self) -> None:
        self._chunks: dict[bool, list[Tensor]] = {False: [], True: []}  # pinned or not
        self._filled: dict[bool, int] = {False: 0, True: 0}  # bytes
        self._later: list[_Later] = []
        self._failure: Exception | None = None  # of `finish`

    def take(self, opened: OpenCheckpoint, sessions: Sequence[Session]) -> list[list[Fragment]] | str:
        """Copy all that `opened` still needs of the training. Collective.

        What the last copy held is overwritten. The copy is whole after `finish`, and before an optimizer steps.

        Args:
            opened: the checkpoint.
            sessions: of its models.

        Returns:
            Each model's fragments, or a sentence: why the copy does not fit the memory of some machine.

        Raises:
            CheckpointError: on every process, where one cannot copy.
        """
        sentence = _lack_of_room(all_or_none(lambda: self._missing_bytes(opened, sessions)))
        return sentence or all_or_none(lambda: self._copy(opened, sessions))

    @torch.inference_mode()  # else what was made inside inference_mode could not be written to
    def finish(self) -> None:
        """Copy the rest, in any thread; `check` tells whether that went well."""
        try:
            for copy in self._later:
                copy.room.copy_(copy.source)
                if copy.source._version != copy.version:
                    raise CheckpointError(
                        f"the {copy.named} was changed while it was copied, after save_state(asynchronous=True) and "
                        "before the next optimizer.step().\nChange optimizer states before the save, or save without "
                        "asynchronous."
                    )
        except Exception as error:  # noqa: BLE001 - `check` raises it, where all processes hear of it
            self._failure = error
        self._later = []

    def check(self) -> None:
        """Raise what went wrong in `finish`.

        Raises:
            CheckpointError: the copy is not what was there when it was begun.
        """
        if self._failure is not None:
            raise self._failure

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
        self._later, self._failure = [], None
        opened.trees = {stem: tree.copy() for stem, tree in opened.trees.items()}
        copies = [
            [
                part
                for fragment in placed_fragments(session_fragments(session), layout)
                for part in self._copy_fragment(fragment, waits=session.states_stay and _storage(fragment) not in held)
            ]
            for session, layout in zip(sessions, opened.layouts, strict=True)
            for held in [{_storage(weight) for weight in session.weight_fragments()}]
        ]
        if self._filled[True]:
            torch.cuda.synchronize()
        for pinned, chunks in self._chunks.items():
            del chunks[-(-self._filled[pinned] // _CHUNK_BYTES) :]
        return copies

    def _copy_fragment(self, fragment: Fragment, *, waits: bool) -> Iterable[Fragment]:
        if fragment.is_elsewhere:
            raise CheckpointError(f"{fragment.name} ({fragment.kind}) is not in memory, and nothing brings it there.")
        begin, end = fragment.written
        if begin == end:
            return
        flat = fragment.values.reshape(-1)[begin:end]
        pinned = flat.device.type == "cuda"
        # What `reshape` had to copy is one of what was there by now.
        waits = waits and flat.device.type == "cpu" and flat.untyped_storage().data_ptr() == _storage(fragment)
        done = 0
        while done < flat.numel():
            room = self._room_for(flat.numel() - done, flat.dtype, pinned)
            source = flat[done : done + room.numel()]
            if waits:
                self._later.append(_Later(f"{fragment.kind} of {fragment.name}", source, room, source._version))
            else:
                room.copy_(source, non_blocking=pinned)
            start = fragment.start + begin + done
            yield Fragment(fragment.kind, fragment.name, fragment.shape, start, room, (0, room.numel()))
            done += room.numel()

    def _room_for(self, count: int, dtype: torch.dtype, pinned: bool) -> Tensor:
        """The next free memory of one chunk: room for `count` elements, or for as many as fit."""
        chunks, filled = self._chunks[pinned], self._filled[pinned]
        index, offset = divmod(filled, _CHUNK_BYTES)
        if index == len(chunks):
            chunks.append(torch.empty(_CHUNK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=pinned))
        taken = min(count * dtype.itemsize, _CHUNK_BYTES - offset)
        self._filled[pinned] += -(-taken // _ALIGNMENT) * _ALIGNMENT
        return chunks[index][offset : offset + taken].view(dtype)


def _storage(fragment: Fragment) -> int:
    """Where the memory that a fragment lies in begins."""
    return fragment.values.untyped_storage().data_ptr()


def _lack_of_room(needed_bytes: int) -> str | None:
    """A sentence if what the processes of some machine need is not available there; the same on all. Collective."""
    told = collectives.gather_object([(platform.node(), needed_bytes, memory_available_bytes(torch.device("cpu")))])
    needed: dict[str, int] = defaultdict(int)
    available: dict[str, list[int]] = defaultdict(list)
    for machine, its_needed, its_available in told:
        needed[machine] += its_needed
        available[machine] += [] if its_available is None else [its_available]
    for machine, total in needed.items():
        least = min(available[machine], default=total)
        if total > 0 and total > least * (1 - _LEFT_FREE):
            return f"the copy takes {total:,} bytes of memory on {machine}, where {least:,} bytes are available"
    return None
