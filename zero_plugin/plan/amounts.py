"""Reads and shows amounts of bytes as people type them: 24GiB, 80GB."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["read_bytes", "show_gib"]

_AMOUNT: Final = re.compile(r"(\d+\.?\d*|\.\d+)\s*(?:([kmgtp])(i?)b?|b|bytes)?", re.IGNORECASE)
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


def read_bytes(amount: int | str) -> int:
    """Bytes in a number, or in a text: `24GiB` and `24Gi` are binary, `24GB` and `24G` decimal, `1e9` not an amount.

    Raises:
        ValueError: it is no amount of bytes.
    """
    found = _AMOUNT.fullmatch(str(amount).strip())
    if not found:
        raise ValueError(f"{amount!r} is no amount of bytes; write e.g. 24GiB, 80GB or a number of bytes")
    number, prefix, binary = found.groups(default="")
    return int(float(number) * (1024 if binary else 1000) ** _POWERS[prefix.lower()])


def show_gib(count: float) -> str:
    """Three digits in GiB, as GPUs are sold and `--gpu_memory` is typed; MiB below a tenth of one."""
    return f"{count / 2**30:,.3g} GiB" if count >= 0.1 * 2**30 else f"{count / 2**20:,.3g} MiB"
