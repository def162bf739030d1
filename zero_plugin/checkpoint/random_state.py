"""The states of Python's, NumPy's and torch's random number generators, of every process."""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zero_plugin.seeding import seed_torch

__all__ = ["random_state", "restore_random_state"]


def random_state() -> dict[str, Any]:
    """This process' generators, as nested containers of arrays and tensors."""
    version, words, gauss = random.getstate()
    return {
        "python": (version, np.array(words, dtype=np.uint64), gauss),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if _uses_cuda() else None,
        "xla": sys.modules["torch_xla"].core.xla_model.get_rng_state() if "torch_xla" in sys.modules else None,
    }


def restore_random_state(saved: Sequence[Mapping[str, Any]], rank: int) -> str | None:
    """Go on drawing where a checkpoint stands; a sentence where this process cannot.

    A process that the checkpoint does not know draws as the first one where all saved ones drew alike, as after one
    `set_seed` for all. Else it begins anew, from a seed made of a saved process' state and its own rank.

    Args:
        saved: of each process that wrote the checkpoint.
        rank: of this process.
    """
    if not saved:
        return "random states: there are none in the checkpoint"  # it was imported
    if rank < len(saved):
        _restore(saved[rank])
        return None
    first = saved[0]
    if all(_same(first, other) for other in saved[1:]):
        _restore(first)
        return f"the random states of process {rank}, which was not there: it draws as the others do"
    other: Tensor = saved[rank % len(saved)]["torch"]
    seed = zlib.crc32(other.numpy().tobytes()) + rank
    random.seed(seed)
    np.random.seed(seed % 2**32)
    seed_torch(seed)
    return f"the random states of process {rank}, which was not there: it is seeded with {seed}"


def _uses_cuda() -> bool:
    """Whether CUDA has begun here: asking for its state would make a context, in a run on the CPU too."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _restore(state: Mapping[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(int(word) for word in words), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if state.get("xla") is not None and "torch_xla" in sys.modules:  # checkpoints of before have no such key
        sys.modules["torch_xla"].manual_seed(state["xla"])


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return (
        torch.equal(one["torch"], other["torch"])
        and np.array_equal(one["python"][1], other["python"][1])
        and np.array_equal(one["numpy"][1], other["numpy"][1])
    )
