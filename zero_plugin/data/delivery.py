"""How a prepared loader's batches reach the loop."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from zero_plugin.seeding import synchronize_rng_states

__all__ = ["Delivery"]


@dataclass(frozen=True)
class Delivery:
    """How batches reach the loop.

    Attributes:
        device: where they go; None leaves them where the loader makes them.
        non_blocking: do not wait for the copy; on CUDA it never is.
        rng_types: random states that every process gets from process 0 at the start of each epoch.
        generator: what `generator` among them means: the data set's own.
    """

    device: torch.device | None = None
    non_blocking: bool = False
    rng_types: tuple[str | Enum, ...] = ()
    generator: torch.Generator | None = None

    def begin_epoch(self) -> None:
        """Give every process the random states of process 0; collective if there are any."""
        known = [kind for kind in self.rng_types if self.generator is not None or str(kind) != "generator"]
        synchronize_rng_states(known, self.generator)
