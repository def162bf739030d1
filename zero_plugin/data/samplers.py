"""A shuffle that depends on the seed and the epoch alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import RandomSampler

__all__ = ["SeedableRandomSampler"]


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
