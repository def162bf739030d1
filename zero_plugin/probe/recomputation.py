"""Works out from one traced step what activation checkpointing of its blocks would keep, without a second trace."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from zero_plugin.nested import list_leaves
from zero_plugin.probe.live_bytes import LiveBytes

__all__ = ["BlockPasses", "watch_blocks"]


@dataclass(slots=True)
class _Pass:
    """One forward of a block, and its backward. Times are numbers of operations.

    Attributes:
        begin, end: of its forward.
        live: bytes alive when it began.
        inputs: the storages that it was given and no earlier block was, and their bytes.
        outputs: addresses of the storages that it made and returned.
        kept: what only the block's own backward needs: with checkpointing it is freed after use, and made again. When
            that is, and bytes; for weights that autocast converted it is the end of the whole forward.
        backward: when its backward begins; None where no gradient comes.
        lost: bytes of its inputs that died in the forward; with checkpointing they stay, for the second forward.
    """

    begin: int
    live: int
    inputs: list[tuple[weakref.ref[Any], int]]
    end: int = 0
    outputs: frozenset[int] = frozenset()
    kept: list[tuple[int, int]] = field(default_factory=list)
    backward: int | None = None
    lost: int = 0

    @property
    def kept_bytes(self) -> int:
        return sum(size for _, size in self.kept)


@dataclass(slots=True)
class BlockPasses:
    """All forwards of the watched blocks in one step, in order.

    Attributes:
        tape: of the step.
        shared: addresses of the storages that something else than a block's own backward needs.
        passes: the forwards.
        forward: operations of the whole forward, once it has ended.
    """

    tape: LiveBytes
    shared: set[int] = field(default_factory=set)
    passes: list[_Pass] = field(default_factory=list)
    forward: int | None = None

    def end_forward(self, outputs: Any) -> None:
        """To be called when the whole forward has ended, with what it returned: later, blocks run a second time."""
        self.forward = len(self.tape.after)
        held = self.shared | {leaf.untyped_storage()._cdata for leaf in _counted(outputs, self.tape)}
        for own in self.passes:
            own.lost = sum(size for storage, size in own.inputs if storage() is None)
            found = self.tape.alive(own.begin, own.end, apart=own.outputs & held)
            own.kept = [(self.forward if kept.converted else kept.used + 1, kept.size) for kept in found]

    def checkpointed(self, saved: int) -> tuple[int, list[int]]:
        """Bytes alive after the forward, and after each operation and each second forward, had all been checkpointed.

        A block's own bytes are absent from the end of its forward to the beginning of its backward, where it runs once
        more; its inputs stay until its backward ends. To be called after the backward.

        Args:
            saved: bytes alive after the forward as it was.
        """
        after = self.tape.after
        # What is alive even now, as a cache of keys, is not made with checkpointing.
        left = [sum(kept.size for kept in self.tape.alive(p.begin, p.end, apart=p.outputs)) for p in self.passes]
        begins = sorted(own.backward for own in self.passes if own.backward is not None)
        changes = [0] * (len(after) + 1)
        for own, cached in zip(self.passes, left, strict=True):
            changes[own.end] += own.lost
            for time, size in own.kept:
                changes[time] -= size
            if own.backward is not None:
                changes[own.backward] += own.kept_bytes
                end = next((begin for begin in begins if begin > own.backward), len(after))
                changes[end] -= own.lost + cached
        totals = list(accumulate(changes))
        alive = [size + total for size, total in zip(after, totals, strict=False)]
        for own, cached in zip(self.passes, left, strict=True):
            if own.backward is not None:
                again = max(after[own.begin : own.end], default=own.live) - own.live - cached
                alive.append(after[own.backward - 1] + totals[own.backward] - own.kept_bytes + again)
        return saved + sum(own.lost - own.kept_bytes for own in self.passes), alive


@contextmanager
def watch_blocks(blocks: Sequence[nn.Module], tape: LiveBytes) -> Iterator[BlockPasses]:
    """Collect each block's forwards and backwards while the tape is entered."""
    found = BlockPasses(tape)
    given: set[tuple[int, int]] = set()
    outside: list[saved_tensors_hooks] = []

    def save(tensor: Tensor) -> Tensor:
        found.shared.add(tensor.untyped_storage()._cdata)
        return tensor

    def step_out() -> None:
        outside.append(saved_tensors_hooks(save, lambda tensor: tensor))
        outside[-1].__enter__()

    def step_in() -> None:
        while outside:
            outside.pop().__exit__()

    def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
        if found.forward is None:
            step_in()
            inputs = {(leaf.untyped_storage()._cdata, tape.born(leaf)): leaf for leaf in _counted((args, kwargs), tape)}
            storages = [leaf.untyped_storage() for key, leaf in inputs.items() if key not in given]
            given.update(inputs)
            found.shared.update(storage._cdata for storage in storages)
            kept = [(weakref.ref(storage), storage.nbytes()) for storage in storages]
            found.passes.append(_Pass(len(tape.after), tape.live, kept))

    def leave(_: nn.Module, __: Any, outputs: Any) -> None:
        if found.forward is not None:
            return
        step_out()
        own = found.passes[-1]
        made = [leaf for leaf in _counted(outputs, tape) if tape.born(leaf) >= own.begin]
        own.end = len(tape.after)
        own.outputs = frozenset(tensor.untyped_storage()._cdata for tensor in made)

        def arrive(_: Tensor) -> None:
            own.backward = len(tape.after)

        differentiable = [tensor for tensor in made if tensor.requires_grad]
        if differentiable:
            differentiable[0].register_hook(arrive)  # type: ignore[no-untyped-call]

    with ExitStack() as stack:
        stack.callback(step_in)
        step_out()
        for block in blocks:
            stack.callback(block.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(leave).remove)
        yield found


def _counted(tree: Any, tape: LiveBytes) -> Iterable[Tensor]:
    return (leaf for leaf in list_leaves(tree) if isinstance(leaf, Tensor) and tape.born(leaf) >= 0)
