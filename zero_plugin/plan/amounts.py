"""Shows amounts of memory as GPUs are sold."""

from __future__ import annotations

import math

__all__ = ["round_up", "show_gib"]


def show_gib(count: float) -> str:
    """Three digits in GiB, all of them from a thousand on; in MiB below a tenth of one."""
    amount, unit = (count / 2**30, "GiB") if count >= 0.1 * 2**30 else (count / 2**20, "MiB")
    return f"{amount:,.0f} {unit}" if amount >= 999.5 else f"{amount:.3g} {unit}"


def round_up(count: int) -> int:
    """The least amount of at least `count` bytes that `show_gib` shows in full."""
    unit = 2**30 if count >= 0.1 * 2**30 else 2**20
    steps = 10 ** max(0, 2 - math.floor(math.log10(max(1, count) / unit)))
    return int(math.ceil(count / unit * steps) / steps * unit)
