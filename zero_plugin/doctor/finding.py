"""What one look at the machine found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "Level"]

Level = Literal["ok", "warning", "wrong"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's table.

    Attributes:
        check: what was looked at.
        level: `wrong` is what the configuration cannot run with; `warning` what will cost time, or may be needed later.
        found: what is there, with its numbers.
        fix: the command or the edit that mends it; never empty unless `level` is `ok`.
    """

    check: str
    level: Level
    found: str
    fix: str = ""
