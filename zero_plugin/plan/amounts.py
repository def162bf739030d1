"""Shows amounts of memory as GPUs are sold."""

from __future__ import annotations

__all__ = ["show_gib"]


def show_gib(count: float) -> str:
    """Three digits in GiB; in MiB below a tenth of one."""
    return f"{count / 2**30:,.3g} GiB" if count >= 0.1 * 2**30 else f"{count / 2**20:,.3g} MiB"
