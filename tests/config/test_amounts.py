"""Amounts as people write them."""

from __future__ import annotations

from typing import Any

import pytest

from zero_plugin.config.amounts import read_bytes, read_count


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (1024, 1024),
        ("1024", 1024),
        ("24GiB", 24 * 2**30),
        ("24 GB", 24 * 10**9),
        ("1.5tib", 3 * 2**39),
        ("0.5MiB", 2**19),
        ("100B", 100),
        ("24", 24),
        *((wrong, None) for wrong in ("24Gb/s", "GiB", "", "-1GiB", 0, -5, True, 1.5, None, "24G", "0GiB")),
    ],
)
def test_bytes(text: Any, expected: int | None) -> None:
    """Binary and decimal units, whole numbers; anything else is no amount."""
    assert read_bytes(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7B", 7 * 10**9),
        ("6.7b", 6_700_000_000),
        ("350M", 350_000_000),
        ("1_000_000", 10**6),
        ("1,000", 1000),
        (12, 12),
        *((wrong, None) for wrong in ("seven", "7GiB", "", "0", "-7B", True)),
    ],
)
def test_counts(text: Any, expected: int | None) -> None:
    """Thousands, millions, billions."""
    assert read_count(text) == expected
