"""Shows amounts of memory as GPUs are sold."""

from __future__ import annotations

__all__ = ["show_gib"]


def show_gib(count: float) -> str:
    """Three digits in GiB, all of them from a thousand on; in MiB below a tenth of one."""
    amount, unit = (count / 2**30, "GiB") if count >= 0.1 * 2**30 else (count / 2**20, "MiB")
    return f"{amount:,.0f} {unit}" if amount >= 999.5 else f"{amount:.3g} {unit}"
