"""Amounts as people write them."""

from __future__ import annotations

from typing import Any

import pytest

from zero_plugin.big_models.placement import convert_file_size_to_int
from zero_plugin.config.amounts import read_bytes, read_count, require_bytes, round_up, show_bytes
from zero_plugin.errors import ConfigError
from zero_plugin.utils import convert_bytes


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
        ("5Gb", 5 * 10**9),
        ("5gb", 5 * 10**9),
        ("5gib", 5 * 2**30),
        (".5KiB", 512),
        ("1.5 kb", 1500),
        ("1 PB", 10**15),
        ("2EiB", 2 * 2**60),
        *((wrong, None) for wrong in ("24Gb/s", "GiB", "", "-1GiB", 0, -5, True, 1.5, None, "24G", "0GiB", "1.2.3GB")),
    ],
)
def test_bytes(text: Any, expected: int | None) -> None:
    """Binary and decimal units and whole numbers are read. Other text is no amount."""
    assert read_bytes(text) == expected


@pytest.mark.parametrize("text", ["5Gb", "5GB", "5gb", "1.5 MiB", "2 tb", ".5KiB", 7, "5 pounds", "-1GB", "GB"])
def test_a_size_is_the_same_everywhere(text: Any) -> None:
    """One rule holds in a configuration, in `max_memory` and in `max_shard_size`, for refusals too."""
    expected = read_bytes(text)
    if expected is None:
        with pytest.raises(ValueError, match="is no size"):
            convert_file_size_to_int(text)
        with pytest.raises(ConfigError, match="is no size"):
            require_bytes("save_model(max_shard_size=…)", text)
    else:
        assert convert_file_size_to_int(text) == require_bytes("--gpu_memory", text) == expected


@pytest.mark.parametrize("size", ["lots", "", "GB", "5 gallons", "-1MB", 0, "0.1B"])
def test_no_size(size: int | str) -> None:
    """For text without a size, or zero bytes, the error has the place, the problem, and a legal value."""
    with pytest.raises(ConfigError, match=r"--gpu_memory: .* is no size(?s:.*)24GiB.*200MB"):
        require_bytes("--gpu_memory", size)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1023, "1,023 bytes"),
        (2048, "2 KiB"),
        (2**20 // 4, "0.25 MiB"),
        (5 * 10**8, "0.466 GiB"),
        (24 * 2**30, "24 GiB"),
        (1234 * 2**30, "1,234 GiB"),
    ],
)
def test_shown(size: float, text: str) -> None:
    """Three digits and a binary unit of at most GiB, so compared sizes share a unit; under Accelerate's name too."""
    assert show_bytes(size) == convert_bytes(size) == text


@pytest.mark.parametrize("size", [1, 999, 1025, 10**5 + 1, 10**6, 10**8 + 7, 109 * 2**30 + 1, 5555 * 2**30 + 5])
def test_what_is_shown_can_be_read(size: int) -> None:
    """A shown size, rounded up, is read as at least the original one."""
    rounded = round_up(size)
    typed = read_bytes(show_bytes(rounded).replace(",", "").replace(" bytes", ""))
    assert typed is not None
    assert size <= typed <= 1.02 * size
    assert abs(typed - rounded) <= 1


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
    """Thousands, millions and billions are read."""
    assert read_count(text) == expected
