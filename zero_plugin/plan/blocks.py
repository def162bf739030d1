"""Rows of identical blocks in a model: extends a trace of few blocks to all, and computes what checkpointing keeps."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from zero_plugin.plan.live_bytes import LiveBytes
from zero_plugin.plan.model_source import full_shape
from zero_plugin.tensors.nested import list_leaves

_LONGEST_HEAD: Final = 4  # blocks before the repetition, like the dense layers in front of a mixture of experts
_LONGEST_PERIOD: Final = 8  # e.g. one layer with attention to all tokens after several with windowed attention
_PERIODS: Final = 3  # periods that a cut row keeps; each further period adds the same bytes
_RELEASES: Final = 4  # points at which memory that all blocks share is freed, e.g. autocast's copies
_PLACES: Final = ("layer_idx", "layer_id", "layer_number", "idx", "index", "i")  # they differ from block to block


def block_rows(module: nn.Module) -> list[nn.Module]:
    """Return the outermost rows of blocks.

    A row is a ModuleList or a Sequential with at least two modules of one class that have submodules, such as
    transformer layers or residual blocks.
    """
    found: list[nn.Module] = []
    for child in module.children():
        kinds = Counter(type(block) for block in child.children() if any(True for _ in block.children()))
        is_row = isinstance(child, nn.ModuleList | nn.Sequential) and max(kinds.values(), default=0) > 1
        found += [child] if is_row else block_rows(child)
    return found


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the modules that activation checkpointing recomputes one by one: those of all `block_rows`."""
    return [block for row in block_rows(module) for block in row.children()]


@dataclass(frozen=True, slots=True)
class Trace:
    """One traced step.

    Attributes:
        saved: bytes alive after the forward.
        flops: floating-point operations of the forward.
        courses: bytes alive after each operation, in three or four parts: the forward; the backward until the first
            weight has its gradient; the rest of the backward; and, with checkpointing, the most bytes alive in each
            block's second forward.
        checkpointed: the same step with activation checkpointing; None without blocks to checkpoint.
        moved: bytes in CPU memory after the forward, held by torch's `save_on_cpu`.
    """

    saved: int
    flops: float
    courses: tuple[list[int], ...]
    checkpointed: Trace | None = None
    moved: int = 0


def trace_few(model: nn.Module, trace: Callable[[], Trace]) -> Trace | None:
    """Return what `trace` would return for the model, from traces with fewer blocks; None if that cannot be derived.

    Each row whose blocks repeat, singly or in a pattern, is cut to its first periods, then to one period more. The
    function compares the two steps, operation by operation. They are alike up to some operation; then the longer step
    has the operations of one period; then they are alike again. Every further period inserts the same operations. The
    result is None in three cases: this would trace no fewer blocks, the forward fails with fewer blocks, or the steps
    differ in another way.

    Args:
        model: has its full rows again after the call; they are shorter while `trace` runs.
        trace: traces the model in its current form.
    """
    rows = [row for found in block_rows(model) if (row := _look_at(found)) is not None]
    shortest = sum(row.rest + _PERIODS * row.period for row in rows)
    traced = shortest * (len(rows) + 1) + sum(row.period for row in rows)
    if traced >= sum(row.rest + row.periods * row.period for row in rows):
        return None
    try:
        with _cut(rows, None):
            base = trace()
        longer = []
        for row in rows:
            with _cut(rows, row):
                longer.append(trace())
    except Exception:  # noqa: BLE001 - a forward that counts its blocks may fail in any way
        return None
    return _extend(base, longer, [row.periods - _PERIODS for row in rows])


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of blocks that repeats.

    Attributes:
        module: the row.
        rest: blocks in front of the repetition plus blocks of an incomplete last period.
        period: blocks after which the row repeats.
        periods: number of complete periods.
    """

    module: nn.Module
    rest: int
    period: int
    periods: int


def _look_at(row: nn.Module) -> _Row | None:
    """Return the row's pattern; None if the row is too short or has none."""
    kinds = [_kind(block) for block in row.children()]
    for period in range(1, _LONGEST_PERIOD + 1):
        for head in range(_LONGEST_HEAD + 1):
            periods, left = divmod(len(kinds) - head, period)
            if periods > _PERIODS and kinds[head:-period] == kinds[head + period :]:
                return _Row(row, head + left, period, periods)
    return None


def _kind(block: nn.Module) -> list[Any]:
    """Return what identical blocks share: classes, shapes, and settings of all modules except the block's position."""
    return [
        (
            name,
            type(module),
            sorted((key, value) for key, value in vars(module).items() if _is_setting(key, value)),
            [(key, full_shape(p), p.dtype, p.requires_grad) for key, p in module.named_parameters(recurse=False)],
            [(key, tuple(b.shape), b.dtype) for key, b in module.named_buffers(recurse=False)],
        )
        for name, module in block.named_modules()
    ]


def _is_setting(name: str, value: Any) -> bool:
    return isinstance(value, bool | int | float | str) and name not in _PLACES


@contextmanager
def _cut(rows: Sequence[_Row], longer: _Row | None) -> Iterator[None]:
    """Cut rows to `_PERIODS` periods inside the context; the row `longer` keeps one period more."""
    whole = [row.module._modules for row in rows]
    try:
        for row, modules in zip(rows, whole, strict=True):
            length = row.rest + row.period * (_PERIODS + (row is longer))
            row.module._modules = dict(list(modules.items())[:length])
        yield
    finally:
        for row, modules in zip(rows, whole, strict=True):
            row.module._modules = modules


def _extend(base: Trace, longer: Sequence[Trace], times: Sequence[int]) -> Trace | None:
    """Return the trace of a step with more periods of each row; None if one more period is not a plain insertion.

    Args:
        base: the trace of the cut rows.
        longer: for each row, the trace with one more period of the row.
        times: for each row, the number of periods to add.
    """
    courses = []
    for one, *others in zip(base.courses, *(found.courses for found in longer), strict=True):
        insertions = [_Insertion.between(one, other) for other in others]
        known = [found for found in insertions if found is not None]
        if len(known) < len(insertions):
            return None
        courses.append(_insert(one, known, times))
    checkpointed = None
    if base.checkpointed is not None:
        recomputing = [found.checkpointed for found in longer if found.checkpointed is not None]
        checkpointed = _extend(base.checkpointed, recomputing, times)
        if checkpointed is None:
            return None
    more = [(found, count) for found, count in zip(longer, times, strict=True)]
    saved = base.saved + sum(count * (found.saved - base.saved) for found, count in more)
    flops = base.flops + sum(count * (found.flops - base.flops) for found, count in more)
    moved = base.moved + sum(count * (found.moved - base.moved) for found, count in more)
    return Trace(saved, flops, tuple(courses), checkpointed, moved)


@dataclass(frozen=True, slots=True)
class _Insertion:
    """The bytes that one more period inserts into a sequence of bytes.

    Attributes:
        place: index of the element in front of which `inserted` goes.
        inserted: the bytes.
        step: how much larger `inserted` is than the period in front of it.
        before: how much every element in front of `place` grows.
        after: how much each element behind the insertion grows.
    """

    place: int
    inserted: list[int]
    step: int
    before: int
    after: list[int]

    @classmethod
    def between(cls, base: list[int], longer: list[int]) -> _Insertion | None:
        """Return the insertion that turns `base` into `longer`; None if a single insertion does not."""
        count = len(longer) - len(base)
        if count < 0 or not base:
            return None if longer else cls(0, [], 0, 0, [])
        before = longer[0] - base[0]
        pairs = enumerate(zip(base, longer, strict=False))
        place = next((index for index, (one, other) in pairs if other - one != before), len(base))
        after = [other - one for one, other in zip(base[place:], longer[place + count :], strict=True)]
        inserted, previous = longer[place : place + count], longer[max(0, place - count) : place]
        steps = {own - one for own, one in zip(inserted, previous, strict=False)} or {0}
        if len(set(after)) > _RELEASES or len(previous) < count or len(steps) > 1:
            return None
        return cls(place, inserted, steps.pop(), before, after)


def _insert(base: list[int], insertions: Sequence[_Insertion], times: Sequence[int]) -> list[int]:
    """Return the sequence after making each insertion the given number of times."""
    made = [(one, count) for one, count in zip(insertions, times, strict=True) if count]
    more = [0] * (len(base) + 1)
    for one, count in made:
        behind = [*one.after, one.after[-1] if one.after else one.before]
        more = [size + count * one.before for size in more[: one.place]] + [
            size + count * own for size, own in zip(more[one.place :], behind, strict=True)
        ]
    found, begin = [], 0
    for one, count in sorted(made, key=lambda pair: pair[0].place):
        found += [size + own for size, own in zip(base[begin : one.place], more[begin:], strict=False)]
        # Insertions of other rows shift these bytes as they shift the element in front of them. The bytes come from a
        # trace with one period more, so they already contain this row's own `before` once.
        offset = (more[one.place - 1] if one.place else 0) - one.before
        for index in range(count):
            found += [size + offset + index * one.step for size in one.inserted]
        begin = one.place
    return [*found, *(size + own for size, own in zip(base[begin:], more[begin:], strict=False))]


@dataclass(slots=True)
class _Pass:
    """One forward of a block and its backward. Times are numbers of operations.

    Attributes:
        begin, end: of its forward.
        live: bytes alive when it began.
        inputs: storages passed to this block and to no earlier one, and their bytes.
        outputs: addresses of the storages that the block created and returned.
        kept: (time, bytes) of each storage that only the block's own backward needs. With checkpointing these are freed
            at that time, and created again in the backward. For weights that autocast converted the time is the end of
            the complete forward.
        backward: when its backward begins; None if no gradient arrives.
        lost: bytes of its inputs that died in the forward. With checkpointing they stay for the second forward.
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
        shared: addresses of the storages that are needed outside of a block's own backward.
        passes: the forwards.
        forward: number of operations in the complete forward, once it has ended.
    """

    tape: LiveBytes
    shared: set[int] = field(default_factory=set)
    passes: list[_Pass] = field(default_factory=list)
    forward: int | None = None

    def end_forward(self, outputs: Any) -> None:
        """Record the end of the complete forward. Call it before the backward, in which blocks run a second time."""
        self.forward = len(self.tape.after)
        held = self.shared | {leaf.untyped_storage()._cdata for leaf in _counted(outputs, self.tape)}
        for own in self.passes:
            own.lost = sum(size for storage, size in own.inputs if storage() is None)
            found = self.tape.alive(own.begin, own.end, apart=own.outputs & held)
            own.kept = [(self.forward if kept.converted else kept.used + 1, kept.size) for kept in found]

    def checkpointed(self, step: Trace) -> Trace:
        """Return the step as it would be with all blocks checkpointed. Call it after the backward.

        A block's own bytes are then absent from the end of its forward to the beginning of its backward, where the
        block runs again. Its inputs stay until its backward ends.

        Args:
            step: the step as traced.
        """
        after, forward = self.tape.after, len(step.courses[0])
        reducing = forward + len(step.courses[1])
        # What is still alive now, e.g. a cache of keys, does not exist with checkpointing.
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
        second_forwards = []
        for own, cached in zip(self.passes, left, strict=True):
            if own.backward is not None:
                again = max(after[own.begin : own.end], default=own.live) - own.live - cached
                second_forwards.append(after[own.backward - 1] + totals[own.backward] - own.kept_bytes + again)
        saved = step.saved + sum(own.lost - own.kept_bytes for own in self.passes)
        courses = (alive[:forward], alive[forward:reducing], alive[reducing:], second_forwards)
        return Trace(saved, step.flops, courses)


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

    def is_watched() -> bool:
        """Return whether this is the first forward, outside of other saved-tensor hooks.

        The caller never checkpoints what `checkpoint` or `save_on_cpu` runs. `step_in` would remove their hooks instead
        of ours.
        """
        return found.forward is None and tape.hooks == len(outside)

    def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
        if is_watched():
            step_in()
            inputs = {(leaf.untyped_storage()._cdata, tape.born(leaf)): leaf for leaf in _counted((args, kwargs), tape)}
            storages = [leaf.untyped_storage() for key, leaf in inputs.items() if key not in given]
            given.update(inputs)
            found.shared.update(storage._cdata for storage in storages)
            kept = [(weakref.ref(storage), storage.nbytes()) for storage in storages]
            found.passes.append(_Pass(len(tape.after), tape.live, kept))

    def leave(_: nn.Module, __: Any, outputs: Any) -> None:
        if not is_watched():
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
