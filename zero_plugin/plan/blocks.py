"""The rows of like blocks that a model is made of: what a trace of few says of all, and what checkpoints would keep."""

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

_LONGEST_HEAD: Final = 4  # blocks before the repetition, as the dense layers in front of a mixture's
_LONGEST_PERIOD: Final = 8  # as of layers with attention to all tokens among those with a window
_PERIODS: Final = 3  # that are kept; what one more adds, each further one adds too
_RELEASES: Final = 4  # at how many points what all blocks hold is given back, as autocast's copies are
_PLACES: Final = ("layer_idx", "layer_id", "layer_number", "idx", "index", "i")  # which are another in every block


def block_rows(module: nn.Module) -> list[nn.Module]:
    """The outermost rows of blocks.

    A row is a ModuleList or a Sequential that holds at least two modules of one class, which have modules of their own:
    transformer layers, residual blocks.
    """
    found: list[nn.Module] = []
    for child in module.children():
        kinds = Counter(type(block) for block in child.children() if any(True for _ in block.children()))
        is_row = isinstance(child, nn.ModuleList | nn.Sequential) and max(kinds.values(), default=0) > 1
        found += [child] if is_row else block_rows(child)
    return found


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """The modules that activation checkpointing recomputes one by one: those of all `block_rows`."""
    return [block for row in block_rows(module) for block in row.children()]


@dataclass(frozen=True, slots=True)
class Trace:
    """One step that was traced.

    Attributes:
        saved: bytes alive after the forward.
        flops: floating-point operations of the forward.
        courses: bytes alive after each operation of the forward; of the backward, until the first weight has its
            gradient; of the rest; then, with checkpointing, the most bytes alive in each block's second forward.
        checkpointed: the same step with activation checkpointing, where there are blocks to checkpoint.
        moved: bytes in CPU memory after the forward, by torch's `save_on_cpu`.
    """

    saved: int
    flops: float
    courses: tuple[list[int], ...]
    checkpointed: Trace | None = None
    moved: int = 0


def trace_few(model: nn.Module, trace: Callable[[], Trace]) -> Trace | None:
    """What `trace` would return of the model, from traces with fewer blocks; None where that is not known.

    A row whose blocks repeat, one by one or in a pattern, is cut to its beginning; then to one period more. The two
    courses of a step are compared, byte by byte: up to some operation they are alike, then the second has a period's
    operations, and from there on they are alike again. Those are what each other period has, too. None is returned
    where that traces no fewer blocks, where the forward does not run with fewer, and where the courses differ in more.

    Args:
        model: as it is after the call; while `trace` runs, its rows are shorter.
        trace: traces the model as it is then.
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
    """A row of blocks.

    Attributes:
        module: the row.
        rest: blocks in front of the repetition, and of a period that ends early, together.
        period: blocks after which the row repeats itself.
        periods: how often.
    """

    module: nn.Module
    rest: int
    period: int
    periods: int


def _look_at(row: nn.Module) -> _Row | None:
    """The row's pattern; None if it is too short or has none."""
    kinds = [_kind(block) for block in row.children()]
    for period in range(1, _LONGEST_PERIOD + 1):
        for head in range(_LONGEST_HEAD + 1):
            periods, left = divmod(len(kinds) - head, period)
            if periods > _PERIODS and kinds[head:-period] == kinds[head + period :]:
                return _Row(row, head + left, period, periods)
    return None


def _kind(block: nn.Module) -> list[Any]:
    """What makes two blocks alike: classes, shapes, and settings of all modules but the block's own place."""
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
    """Rows are `_PERIODS` long meanwhile, one of them a period longer."""
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
    """The trace of a step with so many more periods of each row; None where one more is no insertion.

    Args:
        base: the trace with no more.
        longer: for each row, the trace with one more period of it.
        times: for each row, how many more it has.
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
    """What one period more inserts into a sequence of bytes.

    Attributes:
        place: index in front of which.
        inserted: the bytes.
        step: what they are more than those of the period in front of them.
        before: what the bytes in front of it have more.
        after: what each of those behind it has more.
    """

    place: int
    inserted: list[int]
    step: int
    before: int
    after: list[int]

    @classmethod
    def between(cls, base: list[int], longer: list[int]) -> _Insertion | None:
        """The insertion that makes `longer` of `base`; None where there is none."""
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
    """The sequence with each insertion made so many times."""
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
        # Other rows change it as they change what is in front of it, and its own row as often as it is there again.
        offset = (more[one.place - 1] if one.place else 0) - one.before
        for index in range(count):
            found += [size + offset + index * one.step for size in one.inserted]
        begin = one.place
    return [*found, *(size + own for size, own in zip(base[begin:], more[begin:], strict=False))]


@dataclass(slots=True)
class _Pass:
    """One forward of a block, and its backward. Times are numbers of operations.

    Attributes:
        begin, end: of its forward.
        live: bytes alive when it began.
        inputs: the storages that it was given and no earlier block was, and their bytes.
        outputs: addresses of the storages that it made and returned.
        kept: what only the block's own backward needs: with checkpointing it is freed after use, and made again. When
            that is, and bytes; for weights that autocast converted it is the end of the complete forward.
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
        forward: operations of the complete forward, once it has ended.
    """

    tape: LiveBytes
    shared: set[int] = field(default_factory=set)
    passes: list[_Pass] = field(default_factory=list)
    forward: int | None = None

    def end_forward(self, outputs: Any) -> None:
        """To be called with the outputs when the complete forward has ended: later, blocks run a second time."""
        self.forward = len(self.tape.after)
        held = self.shared | {leaf.untyped_storage()._cdata for leaf in _counted(outputs, self.tape)}
        for own in self.passes:
            own.lost = sum(size for storage, size in own.inputs if storage() is None)
            found = self.tape.alive(own.begin, own.end, apart=own.outputs & held)
            own.kept = [(self.forward if kept.converted else kept.used + 1, kept.size) for kept in found]

    def checkpointed(self, step: Trace) -> Trace:
        """The step, had all blocks been checkpointed.

        A block's own bytes are absent from the end of its forward to the beginning of its backward, where it runs once
        more; its inputs stay until its backward ends. To be called after the backward.

        Args:
            step: as it was.
        """
        after, forward = self.tape.after, len(step.courses[0])
        reducing = forward + len(step.courses[1])
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
        """In the forward, and with no hooks on top: what `checkpoint` or `save_on_cpu` runs is not to be checkpointed.

        To step in there would take their hooks away instead of ours.
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
