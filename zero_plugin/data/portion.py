"""What one process gets at one step."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Portion"]


class Portion(NamedTuple):
    """A collated batch with its counts.

    Attributes:
        batch: what the loader's collate function made.
        samples: samples in it, repeated ones included; None where the data set makes the batches and nobody counts.
        real: samples, from the front, that are not repeated ones; None for all of an uncounted batch.
    """

    batch: Any
    samples: int | None
    real: int | None
