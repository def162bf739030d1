"""Random numbers drawn alike by several copies of a data set, or a second time, without disturbing anybody else's."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["Draws", "SameDraws", "undisturbed"]


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
        self._generators: tuple[_Generator, ...] = _GENERATORS
        self._first = True
        outside = [generator.get() for generator in _GENERATORS]
        for generator in _GENERATORS:
            generator.seed(seed)
        self._inside = [generator.get() for generator in _GENERATORS]
        _restore(_GENERATORS, outside)
        self._outside: list[Any] = []

    def __enter__(self) -> None:
        self._outside = [generator.get() for generator in self._generators]
        _restore(self._generators, self._inside)

    def __exit__(self, *_: object) -> None:
        before, self._inside = self._inside, [generator.get() for generator in self._generators]
        _restore(self._generators, self._outside)
        if self._first:
            self._first = False
            used = [pickle.dumps(a) != pickle.dumps(b) for a, b in zip(before, self._inside, strict=True)]
            self._generators = tuple(g for g, is_used in zip(self._generators, used, strict=True) if is_used)
            self._inside = [state for state, is_used in zip(self._inside, used, strict=True) if is_used]


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
        return cls([generator.get() for generator in _GENERATORS], None if own is None else own.get_state())

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
            _restore(_GENERATORS, self.shared)
            first = list(islice(batches, 1))
        return chain(first, batches)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Python's, NumPy's and torch's global generators go on afterwards as if nothing had been drawn inside."""
    outside = [generator.get() for generator in _GENERATORS]
    try:
        yield
    finally:
        _restore(_GENERATORS, outside)


def _own_generator(sampler: Any) -> torch.Generator | None:
    own = getattr(sampler, "generator", None)
    return own if isinstance(own, torch.Generator) else None


def _restore(generators: tuple[_Generator, ...], states: list[Any]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set(state)
