"""The true sizes of accumulation windows, the shorter last one of an epoch included."""

from __future__ import annotations

__all__ = ["count_windows", "window_size"]


def window_size(accumulation_steps: int, remaining: int | None) -> int | None:
    """Micro-batches in the accumulation window that begins now.

    Args:
        accumulation_steps: micro-batches in a full window.
        remaining: batches left in the epoch, the window's first one included; None where nobody knows.

    Returns:
        The size, or None where it cannot be known yet: then the window ends at `end_of_loader` or when it is full.
    """
    if accumulation_steps == 1:
        return 1
    return None if remaining is None else min(accumulation_steps, remaining)


def count_windows(batches: int, accumulation_steps: int) -> int:
    """Windows, hence optimizer steps, in an epoch of `batches` batches."""
    return -(-batches // accumulation_steps)
