"""Readers and printers of amounts: numbers, sizes in bytes such as `24GiB`, bandwidths, counts such as `7B`."""

from __future__ import annotations

import math
import re
from typing import Any, Final

from zero_plugin.errors import ConfigError, Problem

_NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")

# Limit in characters. Python refuses to parse integers of thousands of digits, and no setting is that long.
_LONGEST: Final = 100


def as_number(text: str) -> int | float | None:
    """Return the number that a text spells in YAML 1.2 or JSON (`2e8`, `5e-5`); None for other text and infinity."""
    if not _NUMBER.fullmatch(text):
        return None
    if text.lstrip("+-").isdigit():
        return int(text) if len(text) < _LONGEST else None
    number = float(text)
    return number if math.isfinite(number) else None


BYTES_PATTERN: Final = r"^\s*(\d+\.?\d*|\.\d+)\s*([KMGTPEkmgtpe][Ii]?)?[Bb]\s*$"
LEAST_MEMORY: Final = 2**20  # bytes: a smaller amount, e.g. `24`, lacks its unit

_COUNT: Final = re.compile(r"\s*(\d[\d_,]*\.?\d*|\.\d+)\s*([KkMmBbGgTt]?)\s*")
_POWERS: Final = {"": 0, "K": 1, "M": 2, "G": 3, "B": 3, "T": 4, "P": 5, "E": 6}


def read_bytes(amount: Any, *, least: int = 1) -> int | None:
    """Return bytes from an integer, or from a string such as `24GiB` (binary) or `24GB` (decimal); otherwise None.

    Case does not matter: `24Gb` is read as `24GB`, because memory is not counted in bits.

    Args:
        amount: the written amount.
        least: the smallest legal amount in bytes; a smaller one returns None.
    """
    if isinstance(amount, int) and not isinstance(amount, bool):
        size = amount
    elif not isinstance(amount, str) or len(amount) > _LONGEST:
        return None
    elif amount.strip().isdigit():
        size = int(amount)
    elif found := re.match(BYTES_PATTERN, amount):
        prefix = (found[2] or "").upper()
        size = int(float(found[1]) * (1024 if prefix.endswith("I") else 1000) ** _POWERS[prefix.rstrip("I")])
    else:
        return None
    return size if size >= least else None


def require_bytes(where: str, amount: Any) -> int:
    """Return bytes, read as in `read_bytes`.

    Args:
        where: the flag or argument that `amount` comes from, for the message.
        amount: the written amount.

    Raises:
        ConfigError: the amount is not a size, or is less than a byte.
    """
    size = read_bytes(amount)
    if size is None:
        fix = 'Write a number of bytes, or e.g. "24GiB" (binary), "80GB" or "200MB" (decimal).'
        raise ConfigError([Problem(where, "", f"{amount!r} is no size", fix)])
    return size


BANDWIDTH_PATTERN: Final = r"^\s*(\d+\.?\d*|\.\d+)\s*([MGT])(b|bit|B)(?:/s|ps)?\s*$"


def read_bandwidth(amount: Any) -> float | None:
    """Return bytes per second from a string; None for other values and for 0.

    `400Gb` and `400Gbps` are bits, as networks are specified; `50GB/s` is bytes.
    """
    found = re.match(BANDWIDTH_PATTERN, amount) if isinstance(amount, str) and len(amount) <= _LONGEST else None
    return float(found[1]) * 1000 ** _POWERS[found[2]] / (1 if found[3] == "B" else 8) or None if found else None


def require_bandwidth(where: str, amount: str) -> float:
    """Return bytes per second, read as in `read_bandwidth`.

    Args:
        where: the flag that `amount` comes from, for the message.
        amount: the written amount.

    Raises:
        ConfigError: the amount is not a bandwidth, or is 0.
    """
    speed = read_bandwidth(amount)
    if speed is None:
        fix = "Write bits per second, e.g. 400Gb, or bytes, e.g. 50GB/s."
        raise ConfigError([Problem(where, "", f"{amount!r} is no bandwidth", fix)])
    return speed


def read_count(amount: Any) -> int | None:
    """Return a count from an integer, or from a string such as `7B`, `350M` or `1_000_000`; otherwise None."""
    found = _COUNT.fullmatch(str(amount)[: _LONGEST + 1])
    if found is None or isinstance(amount, bool) or len(found[0]) > _LONGEST:
        return None
    return round(float(found[1].replace(",", "").replace("_", "")) * 1000 ** _POWERS[found[2].upper()]) or None


def require_count(where: str, amount: Any, example: str) -> int | None:
    """Return a count, read as in `read_count`; None for None.

    Args:
        where: the flag that `amount` comes from, for the message.
        amount: the written amount.
        example: a valid count, for the message.

    Raises:
        ConfigError: the amount is not a count.
    """
    count = read_count(amount)
    if amount is not None and count is None:
        raise ConfigError([Problem(where, "", f"{amount!r} is no count", f"Write e.g. {example}.")])
    return count


_UNITS: Final = (("GiB", 2**30, 0.1 * 2**30), ("MiB", 2**20, 0.1 * 2**20), ("KiB", 2**10, 2**10), ("bytes", 1, 0))


def show_bytes(size: float) -> str:
    """Return a size as text in GiB; below 0.1 GiB in MiB, and so on. It has three digits, or all digits above 999."""
    unit, name = _unit(size)
    amount = size / unit
    return f"{amount:,.0f} {name}" if amount >= 999.5 else f"{amount:.3g} {name}"


def round_up(count: int) -> int:
    """Return the smallest size of at least `count` bytes that `show_bytes` prints exactly."""
    unit, _ = _unit(count)
    steps = 10 ** max(0, 2 - math.floor(math.log10(max(1, count) / unit)))
    return int(math.ceil(count / unit * steps) / steps * unit)


def _unit(size: float) -> tuple[int, str]:
    """Return bytes and name of the unit for a size. GiB is the largest unit, so users compare sizes in one unit."""
    return next((unit, name) for name, unit, least in _UNITS if size >= least or unit == 1)
