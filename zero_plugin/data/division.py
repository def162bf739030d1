"""How batches, as lists of indices, are divided among the processes; and random numbers that are drawn alike."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, compress, cycle, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import RandomSampler

from zero_plugin.errors import LoopError


class Portion(NamedTuple):
    """A collated batch with its counts.

    Attributes:
        batch: what the loader's collate function made.
        samples: samples in it, repeated ones included; None where the dataset makes the batches and nobody counts.
        real: how many of them, from the front, are not repeated ones; None for all.
        fingerprint: of the beginning of the stream that it comes from; None where streams need not agree.
    """

    batch: Any
    samples: int | None
    real: int | None
    fingerprint: int | None = None


class Share(NamedTuple):
    """One process's part of one step.

    Attributes:
        indices: what the dataset is asked for.
        real: how many of them, from the front, are not repeated to make the step even.
    """

    indices: list[Any]
    real: int

    @property
    def samples(self) -> int:
        """How many samples it has, repeated ones included."""
        return len(self.indices)


@dataclass(frozen=True, slots=True)
class Sharing:
    """How batches are shared.

    Attributes:
        rank, world: this process among how many.
        batch_size: samples in a full batch of one process; None where batches have no common size.
        even: complete the last step from the first samples of the epoch, so that every process has a full batch.
        split: each of the loader's batches is cut into one piece per process, instead of dealt out whole.
        drop_last: an incomplete last step is left out, as the loader was configured.
        batched: False where the loader does not batch: then an item of its sampler or stream is a batch by itself, of
            unknown size, and counts here as one sample.
        cut: into how many batches each of the user's was cut before.
    """

    rank: int
    world: int
    batch_size: int | None
    even: bool = True
    split: bool = False
    drop_last: bool = False
    batched: bool = True
    cut: int = 1


def share_batches(
    batches: Iterable[list[Any]], how: Sharing, report_dropped: Callable[[int], None] | None
) -> Iterator[Share]:
    """This process's shares, one per step.

    At step k the processes' shares, in the order of ranks, are the batches k·world … (k+1)·world-1 of `batches`, or
    with `split` the pieces of batch k. Only the last step can be incomplete. It is then completed from the epoch's
    first samples (`even`), or left out on every process where some process would have nothing (`report_dropped` gets
    the number of samples lost, unless `drop_last` requested it). Without `report_dropped` each process goes on as far
    as its own shares reach, and the first ones may have one more than the last.

    Raises:
        LoopError: with `split`, a batch that is not the last does not hold world × batch_size samples.
    """
    steps = _cut(batches, how) if how.split and how.world > 1 else _deal(batches, how.world)
    step = first = next(steps, None)
    while step is not None:
        # Whether it is the last matters only where it is incomplete, and the batches may depend on when they are drawn.
        is_full = _is_full(step, how)
        following = None if is_full else next(steps, None)
        if len(step) > how.world or (following is not None and len(step) < how.world):
            raise LoopError(
                f"split_batches: the batch sampler gave {sum(map(len, step))} samples; every batch but the last must "
                f"hold {how.world} × {how.batch_size}. Use split_batches=False with batches of varying size"
            )
        if following is None and not is_full and how.even and not how.drop_last:
            assert first is not None
            yield _complete(step, first, how)
        elif len(step) == how.world or (how.rank < len(step) and report_dropped is None and not how.drop_last):
            own = step[how.rank]
            yield Share(own, len(own))
        elif not how.drop_last and report_dropped is not None:
            report_dropped(sum(map(len, step)))
        step = next(steps, None) if is_full else following


def _is_full(step: list[list[Any]], how: Sharing) -> bool:
    """Whether every process surely has its share of it as it is."""
    if len(step) != how.world:
        return False
    return not how.even or how.drop_last or all(len(batch) == (how.batch_size or len(batch)) for batch in step)


def _deal(batches: Iterable[list[Any]], world: int) -> Iterator[list[list[Any]]]:
    iterator = iter(batches)
    while step := [batch if hasattr(batch, "__len__") else list(batch) for batch in islice(iterator, world)]:
        yield step


def _cut(batches: Iterable[list[Any]], how: Sharing) -> Iterator[list[list[Any]]]:
    size = how.batch_size
    assert size is not None
    for batch in map(list, batches):
        yield [batch[start : start + size] for start in range(0, len(batch), size)]


def _complete(step: list[list[Any]], first: list[list[Any]], how: Sharing) -> Share:
    """This process's share of the last step, filled up from the first step's samples, round and round."""
    if how.batch_size is None:  # nothing says what a full batch is: missing ones are the first ones over again
        missing = how.rank - len(step)
        return Share(step[how.rank], len(step[how.rank])) if missing < 0 else Share(first[missing % len(first)], 0)
    filler = cycle(chain.from_iterable(first))
    for real in [*step, *[[]] * how.world][: how.rank + 1]:
        own = [*real, *islice(filler, max(0, how.batch_size - len(real)))]
    return Share(own, len(real))


class _Generator(NamedTuple):
    get: Callable[[], Any]
    set: Callable[[Any], None]
    seed: Callable[[int], Any]


_GENERATORS = (
    _Generator(random.getstate, random.setstate, random.seed),
    _Generator(np.random.get_state, np.random.set_state, lambda seed: np.random.seed(seed % 2**32)),
    # torch.manual_seed would reseed the GPUs too
    _Generator(torch.get_rng_state, torch.set_rng_state, torch.default_generator.manual_seed),
)


class SameDraws:
    """A context in which Python's, NumPy's and torch's global generators go on from where it was last left.

    Wherever it began with the same seed, what is drawn inside is the same; outside, the generators are as if it had
    never been entered. A generator that the first time inside draws nothing from is left alone afterwards, since
    exchanging NumPy's takes longer than reading a small sample.

    Args:
        seed: where the generators begin.
    """

    def __init__(self, seed: int) -> None:
        self._used: list[_Generator] | None = None  # unknown before the first time
        with undisturbed():
            for generator in _GENERATORS:
                generator.seed(seed)
            self._inside = _states()
        self._outside: list[Any] = []

    def __enter__(self) -> None:
        self._outside = _states(self._used)
        _restore(self._inside, self._used)

    def __exit__(self, *_: object) -> None:
        before, self._inside = self._inside, _states(self._used)
        _restore(self._outside, self._used)
        if self._used is None:
            drawn = [pickle.dumps(a) != pickle.dumps(b) for a, b in zip(before, self._inside, strict=True)]
            self._used, self._inside = list(compress(_GENERATORS, drawn)), list(compress(self._inside, drawn))


class Draws(NamedTuple):
    """What an epoch's order is drawn from.

    Attributes:
        shared: states of Python's, NumPy's and torch's global generators; none where the order is not drawn at all.
        own: state of the sampler's own generator; None without one.
    """

    shared: list[Any]
    own: Any

    @classmethod
    def of(cls, sampler: Any) -> Draws:
        """As they stand now."""
        own = _own_generator(sampler)
        return cls(_states(), None if own is None else own.get_state())

    def begin(self, batches: Iterator[Any], sampler: Any) -> Iterator[Any]:
        """The batches of `sampler`, the first drawn from here; the global generators stay as they are.

        torch's samplers draw all that they take of the global generators before their first batch.
        """
        if not self.shared:
            return batches
        own = _own_generator(sampler)
        if own is not None and self.own is not None:
            own.set_state(self.own)
        with undisturbed():
            _restore(self.shared)
            first = list(islice(batches, 1))
        return chain(first, batches)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Python's, NumPy's and torch's global generators go on afterwards as if nothing had been drawn inside."""
    outside = _states()
    try:
        yield
    finally:
        _restore(outside)


def _own_generator(sampler: Any) -> torch.Generator | None:
    own = getattr(sampler, "generator", None)
    return own if isinstance(own, torch.Generator) else None


def _states(generators: Iterable[_Generator] | None = None) -> list[Any]:
    return [generator.get() for generator in (_GENERATORS if generators is None else generators)]


def _restore(states: list[Any], generators: Iterable[_Generator] | None = None) -> None:
    for generator, state in zip(_GENERATORS if generators is None else generators, states, strict=True):
        generator.set(state)


class SeedableRandomSampler(RandomSampler):
    """torch's RandomSampler, with its generator seeded by `initial_seed + epoch` at the start of each epoch.

    Each whole iteration ends an epoch, unless `set_epoch` says otherwise.

    Attributes:
        initial_seed: `data_seed`, or torch's seed when the sampler was made.
        epoch: the next one.

    Args:
        *args: of `torch.utils.data.RandomSampler`, as the other keyword arguments.
        data_seed: None takes torch's current seed.
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.initial_seed + self.epoch)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Begin with this epoch at the next start."""
        self.epoch = epoch
