"""The rows of like blocks that a model is made of, and what a trace of few of them says of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from zero_plugin.plan.model_source import full_shape

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
        courses: bytes alive after each operation of the forward; then of the backward; then, with checkpointing, the
            most bytes alive in each block's second forward.
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
