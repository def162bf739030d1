"""Works out from one traced step what activation checkpointing of its blocks would keep, without a second trace."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from zero_plugin.nested import list_leaves
from zero_plugin.probe.live_bytes import LiveBytes

__all__ = ["BlockPass", "recomputed", "watch_blocks"]


@dataclass(slots=True)
class BlockPass:
    """One forward of a block, and its backward. Times are numbers of operations.

    Attributes:
        begin, end: of its forward.
        live: bytes alive when it began.
        inputs: the storages that it was given and no earlier block was, and their bytes.
        kept: bytes that only the block's own backward needs: with checkpointing they are freed, and made again.
        cached: of those, weights that autocast converted, which stay until the whole forward ends.
        backward: when its backward begins; None where no gradient comes.
    """

    begin: int
    live: int
    inputs: list[tuple[weakref.ref[Any], int]]
    end: int = 0
    kept: int = 0
    cached: int = 0
    backward: int | None = None

    def lost(self) -> int:
        """Bytes of its inputs that died since, which checkpointing would keep for the second forward."""
        return sum(size for storage, size in self.inputs if storage() is None)


@contextmanager
def watch_blocks(blocks: Sequence[nn.Module], tape: LiveBytes) -> Iterator[list[BlockPass]]:
    """Collect each block's forwards and backwards while the tape is entered; forwards only until the first backward."""
    passes: list[BlockPass] = []
    given: set[tuple[int, int]] = set()
    is_backward = False

    def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
        if is_backward:  # the model checkpoints by itself, and this is a second forward
            return
        inputs = []
        for leaf in list_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and tape.born(leaf) >= 0:
                storage = leaf.untyped_storage()
                if (storage._cdata, tape.born(leaf)) not in given:
                    given.add((storage._cdata, tape.born(leaf)))
                    inputs.append((weakref.ref(storage), storage.nbytes()))
        passes.append(BlockPass(len(tape.after), tape.live, inputs, cached=tape.converted))

    def leave(_: nn.Module, __: Any, outputs: Any) -> None:
        if is_backward:
            return
        own = passes[-1]
        made = [leaf for leaf in list_leaves(outputs) if isinstance(leaf, Tensor) and tape.born(leaf) >= own.begin]
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in made}
        own.end, own.cached = len(tape.after), tape.converted - own.cached
        own.kept = tape.live - own.live - sum(storages.values())

        def arrive(_: Tensor) -> None:
            nonlocal is_backward
            is_backward = True
            own.backward = len(tape.after)

        differentiable = [tensor for tensor in made if tensor.requires_grad]
        if differentiable:
            differentiable[0].register_hook(arrive)  # type: ignore[no-untyped-call]

    with ExitStack() as stack:
        for block in blocks:
            stack.callback(block.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(leave).remove)
        yield passes


def recomputed(after: Sequence[int], forward: int, lost: Sequence[int], passes: Sequence[BlockPass]) -> list[int]:
    """Bytes alive after each operation of a step, and at each second forward, had every block been checkpointed.

    A block's own bytes are absent from the end of its forward to the beginning of its backward, where it runs once
    more. Its inputs stay until its backward ends.

    Args:
        after: bytes alive after each operation of the step as it is.
        forward: operations of the whole forward.
        lost: of each pass, after the forward.
        passes: of all blocks.
    """
    begins = sorted(own.backward for own in passes if own.backward is not None)
    changes = [0] * (len(after) + 1)
    for own, inputs in zip(passes, lost, strict=True):
        changes[own.end] += inputs - own.kept + own.cached
        changes[forward] -= own.cached
        if own.backward is not None:
            changes[own.backward] += own.kept
            changes[next((begin for begin in begins if begin > own.backward), len(after))] -= inputs
    totals = list(accumulate(changes))
    alive = [size + total for size, total in zip(after, totals, strict=False)]
    for own in passes:
        if own.backward is not None:
            again = max(after[own.begin : own.end], default=own.live) - own.live
            alive.append(after[own.backward - 1] + totals[own.backward] - own.kept + again)
    return alive
