"""What one process gets at one step."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Portion"]


class Portion(NamedTuple):
    """A collated batch with its counts.

    Attributes:
        batch: what the loader's collate function made.
        samples: samples in it, repeated ones included; None where the data set makes the batches and nobody counts.
        real: how many of them, from the front, are not repeated ones; None for all.
        fingerprint: of the beginning of the stream that it comes from; None where streams need not agree.
    """

    batch: Any
    samples: int | None
    real: int | None
    fingerprint: int | None = None
