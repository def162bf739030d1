"""Amounts as people write them, read and shown.

Amounts as people write them: bytes such as `24GiB`, counts such as `7B`.

Shows amounts of memory as GPUs are sold.
"""

from __future__ import annotations

import math
import re
from typing import Any, Final

BYTES_PATTERN: Final = r"^\s*(\d+\.?\d*|\.\d+)\s*([KMGTkmgt][Ii]?)?[Bb]\s*$"
LEAST_MEMORY: Final = 2**20  # bytes: who writes less, `24`, has left the unit out

_COUNT: Final = re.compile(r"\s*(\d[\d_,]*\.?\d*|\.\d+)\s*([KkMmBbGgTt]?)\s*")
_POWERS: Final = {"": 0, "K": 1, "M": 2, "G": 3, "B": 3, "T": 4}


def read_bytes(amount: Any) -> int | None:
    """Bytes in a whole number, or in a text such as `24GiB` (binary) or `24GB` (decimal); None for anything else."""
    if isinstance(amount, int) and not isinstance(amount, bool):
        return amount if amount > 0 else None
    if not isinstance(amount, str):
        return None
    if amount.strip().isdigit():
        return int(amount) or None
    found = re.match(BYTES_PATTERN, amount)
    if found is None:
        return None
    prefix = (found[2] or "").upper()
    return int(float(found[1]) * (1024 if prefix.endswith("I") else 1000) ** _POWERS[prefix.rstrip("I")]) or None


def read_count(amount: Any) -> int | None:
    """A count in a whole number, or in a text such as `7B`, `350M` or `1_000_000`; None for anything else."""
    found = _COUNT.fullmatch(str(amount))
    if found is None or isinstance(amount, bool):
        return None
    return round(float(found[1].replace(",", "").replace("_", "")) * 1000 ** _POWERS[found[2].upper()]) or None


def show_gib(count: float) -> str:
    """Three digits in GiB, all of them from a thousand on; in MiB below a tenth of one."""
    amount, unit = (count / 2**30, "GiB") if count >= 0.1 * 2**30 else (count / 2**20, "MiB")
    return f"{amount:,.0f} {unit}" if amount >= 999.5 else f"{amount:.3g} {unit}"


def round_up(count: int) -> int:
    """The least amount of at least `count` bytes that `show_gib` shows in full."""
    unit = 2**30 if count >= 0.1 * 2**30 else 2**20
    steps = 10 ** max(0, 2 - math.floor(math.log10(max(1, count) / unit)))
    return int(math.ceil(count / unit * steps) / steps * unit)
