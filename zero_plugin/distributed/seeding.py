"""Random numbers: seed every generator that a script draws from, make processes draw alike, and keep the states."""

from __future__ import annotations

import os
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from itertools import compress, islice
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from zero_plugin.distributed.collectives import broadcast, process_index
from zero_plugin.errors import LoopError


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python, NumPy and torch (all devices).

    Args:
        seed: any non-negative integer; NumPy gets it modulo 2**32, which is all that it takes.
        device_specific: add the process index, so that processes draw differently.
        deterministic: also make torch refuse operations without a deterministic implementation.
    """
    if device_specific:
        # Before `Accelerator()` there is no process group, but the launcher has set which process this is.
        seed += process_index() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    random.seed(seed)
    np.random.seed(seed % 2**32)
    seed_torch(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it in deterministic mode
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def seed_torch(seed: int) -> None:
    """Seed torch's generators: the CPU's and every device's, also of one not yet initialised."""
    torch.manual_seed(seed)
    if "torch_xla" in sys.modules:  # which has a generator that torch does not know
        sys.modules["torch_xla"].manual_seed(seed)


def synchronize_rng_state(rng_type: str | Enum, generator: torch.Generator | None = None) -> None:
    """Let one of torch's generators draw on every process what process 0's draws; collective.

    Args:
        rng_type: `torch` for the CPU's, `cuda` for this process's GPU's, `generator` for the one given.
        generator: for `generator`.

    Raises:
        LoopError: there is no such generator here.
    """
    kind = str(rng_type.value if isinstance(rng_type, Enum) else rng_type)
    generators: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], object]]] = {
        "torch": (torch.get_rng_state, torch.set_rng_state)
    }
    if torch.cuda.is_available():
        generators["cuda"] = (torch.cuda.get_rng_state, torch.cuda.set_rng_state)
    if generator is not None:
        generators["generator"] = (generator.get_state, generator.set_state)
    if kind not in generators:
        raise LoopError(
            f"synchronize_rng_state({kind!r}): this process can synchronise {', '.join(generators)}"
            f"{'' if generator else ', and with generator=… generator'}."
        )
    get, put = generators[kind]
    put(broadcast(get()))


def synchronize_rng_states(rng_types: Iterable[str | Enum], generator: torch.Generator | None = None) -> None:
    """`synchronize_rng_state` for each of several."""
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator)


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


def _states(generators: Iterable[_Generator] = _GENERATORS) -> list[Any]:
    return [generator.get() for generator in generators]


def _restore(states: list[Any], generators: Iterable[_Generator] = _GENERATORS) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set(state)


@contextmanager
def undisturbed(own: torch.Generator | None = None) -> Iterator[None]:
    """Python's, NumPy's and torch's global generators, and `own`, go on as if nothing had been drawn inside."""
    outside, then = _states(), None if own is None else own.get_state()
    try:
        yield
    finally:
        _restore(outside)
        if own is not None and then is not None:
            own.set_state(then)


_DRAWN_TOGETHER = 1024  # batches, of those that are drawn a second time


class SameDraws:
    """A context in which Python's, NumPy's and torch's global generators go on from where it was last left.

    Wherever it began with the same seed, what is drawn inside is the same; outside, the generators are as if it had
    never been entered. A generator that the first time inside draws nothing from is left alone afterwards, since
    exchanging NumPy's takes longer than reading a small sample.

    Args:
        seed: where the generators begin.
    """

    def __init__(self, seed: int) -> None:
        self._used: Sequence[_Generator] = _GENERATORS
        self._is_known = False  # what is used: only after the first time
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
        if not self._is_known:
            self._is_known = True
            drawn = [pickle.dumps(a) != pickle.dumps(b) for a, b in zip(before, self._inside, strict=True)]
            self._used, self._inside = list(compress(_GENERATORS, drawn)), list(compress(self._inside, drawn))


def generator_of(source: Any) -> torch.Generator | None:
    """The generator that a sampler or a dataset draws from, where it shows one."""
    own = getattr(source, "generator", None)
    return own if isinstance(own, torch.Generator) else None


class Draws(NamedTuple):
    """What an epoch's order is drawn from.

    Attributes:
        shared: states of Python's, NumPy's and torch's global generators; none where the order is not drawn at all.
        own: state of the sampler's own generator; None without one.
        drawn: the batches that were drawn from here on, of which each may have taken something of the generators.
        checksum: of these, or of an order that was drawn at once; None where there is none.
        ended: whether that was all, and the sampler was asked for more.
    """

    shared: list[Any]
    own: Any
    drawn: int = 1
    checksum: str | None = None
    ended: bool = False

    @classmethod
    def of(cls, sampler: Any) -> Draws:
        """As they stand now."""
        own = generator_of(sampler)
        return cls(_states(), None if own is None else own.get_state())

    def begin(self, batches: Iterable[Any], sampler: Any) -> Iterator[Any]:
        """The batches of `sampler`, the first ones drawn from here; all generators stay as they are.

        torch's samplers draw all that they take of the global generators before their first batch; others do when they
        are asked for an iterator, or now and then.
        """
        shared, own, drawing = self.shared, self.own, generator_of(sampler)
        left, iterator = max(1, self.drawn) + self.ended if shared else 0, None
        while left > 0:
            with undisturbed(drawing):
                _restore(shared)
                if drawing is not None and own is not None:
                    drawing.set_state(own)
                iterator = iter(batches) if iterator is None else iterator
                part = list(islice(iterator, min(left, _DRAWN_TOGETHER)))
                shared, own = _states(), None if drawing is None else drawing.get_state()
            yield from part
            left -= len(part) or left
        yield from batches if iterator is None else iterator
