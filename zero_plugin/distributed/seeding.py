"""Seed every random number generator that a training script draws from, and make the processes' alike."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterable
from enum import Enum

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
