"""Splitting what every process holds: consecutive parts, together complete, of one length on request."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from zero_plugin.distributed.processes import split
from zero_plugin.errors import LoopError

CPU = torch.device("cpu")


def shares(inputs: Any, count: int, padded: bool = False) -> list[Any]:
    return [split(inputs, index, count, padded_on=CPU if padded else None) for index in range(count)]


@pytest.mark.parametrize(
    ("length", "count", "sizes"), [(7, 3, [3, 2, 2]), (4, 2, [2, 2]), (2, 4, [1, 1, 0, 0]), (0, 2, [0, 0])]
)
def test_shares_are_consecutive_and_the_first_are_longer(length: int, count: int, sizes: list[int]) -> None:
    """Lists, tuples, tensors, arrays and dicts of them are split into consecutive parts, the first ones longer."""
    numbers = list(range(length))
    for inputs in (numbers, tuple(numbers), torch.arange(length), np.arange(length), range(length)):
        found = shares(inputs, count)
        assert [len(share) for share in found] == sizes
        assert [int(number) for share in found for number in share] == numbers
    found = shares({"a": numbers, "b": {"c": torch.arange(length)}}, count)
    assert [share["a"] for share in found] == [share["b"]["c"].tolist() for share in found]


def test_types_are_kept_and_the_input_too() -> None:
    """A tuple stays a tuple, and a dict is not changed in place, since the next part needs it."""
    inputs = {"a": (1, 2, 3), "b": torch.arange(6).view(3, 2)}
    share = split(inputs, 1, 2, padded_on=CPU)
    assert share["a"] == (3, 3)
    assert share["b"].tolist() == [[4, 5], [4, 5]]
    assert inputs["a"] == (1, 2, 3)
    assert len(inputs["b"]) == 3


@pytest.mark.parametrize(("length", "count"), [(7, 3), (4, 2), (2, 4)])
def test_padding_repeats_the_last(length: int, count: int) -> None:
    """With padding all parts are as long as the longest, so results can be gathered."""
    found = shares(list(range(length)), count, padded=True)
    assert len({len(share) for share in found}) == 1
    assert sorted({number for share in found for number in share}) == list(range(length))
    assert found[-1][-1] == length - 1
    assert [share.tolist() for share in shares(torch.arange(length), count, padded=True)] == found


def test_one_process_gets_all() -> None:
    """One process gets everything unchanged."""
    assert split(["a", "b"], 0, 1, padded_on=None) == ["a", "b"]
    assert split([], 0, 1, padded_on=CPU) == []


def test_a_data_set_is_selected_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `datasets.Dataset` returns parts of its own type by `select`, without an import of the package."""

    class Dataset:
        def __init__(self, rows: Sequence[int]) -> None:
            self.rows = rows

        def __len__(self) -> int:
            return len(self.rows)

        def select(self, indices: Sequence[int]) -> Dataset:
            return Dataset([self.rows[index] for index in indices])

    package = ModuleType("datasets")
    package.Dataset = Dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", package)
    assert [share.rows for share in shares(Dataset([5, 6, 7]), 2)] == [[5, 6], [7]]
    assert [share.rows for share in shares(Dataset([5, 6, 7]), 2, padded=True)] == [[5, 6], [7, 7]]


def test_what_cannot_be_divided_is_refused_on_one_process_too() -> None:
    """Strings, and dicts of unequal lengths, are refused on one process too."""
    with pytest.raises(LoopError, match="cannot divide a str"):
        split("text", 0, 1, padded_on=None)
    with pytest.raises(LoopError, match="cannot divide a set"):
        split({"a": {1, 2}}, 0, 2, padded_on=None)
    with pytest.raises(LoopError, match=r"values of one length.*\{'a': 2, 'b': 1\}"):
        split({"a": [1, 2], "b": [1]}, 0, 2, padded_on=None)
    with pytest.raises(LoopError, match="no element to repeat"):
        split([], 0, 2, padded_on=CPU)
