"""Random numbers: seeds all generators of a script, synchronises processes, and saves and restores states."""

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
        seed: any non-negative integer. NumPy only accepts less than 2**32, so it gets the seed modulo 2**32.
        device_specific: add the process index, to make processes draw different numbers.
        deterministic: also make torch refuse operations without a deterministic implementation.
    """
    if device_specific:
        # Before `Accelerator()`, no process group exists, but the launcher has set the rank.
        seed += process_index() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    random.seed(seed)
    np.random.seed(seed % 2**32)
    seed_torch(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS requires this in deterministic mode
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def seed_torch(seed: int) -> None:
    """Seed torch's generators: the CPU's and every device's, even if the device is not initialised yet."""
    torch.manual_seed(seed)
    if "torch_xla" in sys.modules:  # torch does not seed the generator of torch_xla
        sys.modules["torch_xla"].manual_seed(seed)


def synchronize_rng_state(rng_type: str | Enum, generator: torch.Generator | None = None) -> None:
    """Copy the state of one of torch's generators from process 0 to every process. Collective.

    Args:
        rng_type: `torch` for the CPU's generator, `cuda` for this process's GPU's, `generator` for the argument.
        generator: the generator for `generator`.

    Raises:
        LoopError: this process has no such generator.
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
    """Call `synchronize_rng_state` for each type. Collective."""
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator)


class _Generator(NamedTuple):
    get: Callable[[], Any]
    set: Callable[[Any], None]
    seed: Callable[[int], Any]


_GENERATORS = (
    _Generator(random.getstate, random.setstate, random.seed),
    _Generator(np.random.get_state, np.random.set_state, lambda seed: np.random.seed(seed % 2**32)),
    # `torch.manual_seed` would seed the GPUs too.
    _Generator(torch.get_rng_state, torch.set_rng_state, torch.default_generator.manual_seed),
)


def _states(generators: Iterable[_Generator] = _GENERATORS) -> list[Any]:
    return [generator.get() for generator in generators]


def _restore(states: list[Any], generators: Iterable[_Generator] = _GENERATORS) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set(state)


@contextmanager
def undisturbed(own: torch.Generator | None = None) -> Iterator[None]:
    """Restore Python's, NumPy's and torch's global generators, and `own`, to their states from before the context."""
    outside, then = _states(), None if own is None else own.get_state()
    try:
        yield
    finally:
        _restore(outside)
        if own is not None and then is not None:
            own.set_state(then)


_DRAWN_TOGETHER = 1024  # batches per chunk when an epoch's first batches are drawn again


class SameDraws:
    """A context in which Python's, NumPy's and torch's global generators continue from its previous exit.

    Contexts with the same seed draw the same numbers inside. Outside, the generators are not affected. A generator that
    was not used inside the first time is not exchanged afterwards, since exchanging NumPy's state takes longer than
    reading a small sample.

    Args:
        seed: the seed of the generators at the first entry.
    """

    def __init__(self, seed: int) -> None:
        self._used: Sequence[_Generator] = _GENERATORS
        self._is_known = False  # whether the used generators are known: only after the first exit
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
    """Return the generator that a sampler or a dataset draws from, if it has an attribute for it."""
    own = getattr(source, "generator", None)
    return own if isinstance(own, torch.Generator) else None


class Draws(NamedTuple):
    """The generator states from which an epoch's order is drawn.

    Attributes:
        shared: states of Python's, NumPy's and torch's global generators; empty if the order is not random.
        own: state of the sampler's own generator; None without one.
        drawn: the number of batches drawn since then. Each may have used the generators.
        checksum: checksum of these batches, or of an order that was drawn in one piece; None without either.
        ended: whether the sampler was asked for more after its last batch.
    """

    shared: list[Any]
    own: Any
    drawn: int = 1
    checksum: str | None = None
    ended: bool = False

    @classmethod
    def of(cls, sampler: Any) -> Draws:
        """Record the current states."""
        own = generator_of(sampler)
        return cls(_states(), None if own is None else own.get_state())

    def begin(self, batches: Iterable[Any], sampler: Any) -> Iterator[Any]:
        """Yield the batches of `sampler`, the first ones drawn from these states. The generators' own states are kept.

        torch's samplers use the global generators only before their first batch. Other samplers use them when an
        iterator is created, or at any batch.
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
