"""Counting, cutting and joining batches by their samples."""

from __future__ import annotations

import pytest
import torch

from zero_plugin.data.batches import count_rows, cut_rows, join_rows
from zero_plugin.errors import LoopError

BATCH = {
    "ids": torch.arange(6).reshape(3, 2),
    "names": ["a", "b", "c"],
    "pairs": [torch.arange(3), ("x", "y", "z")],
    "scale": torch.tensor(2.0),
    "kind": "train",
    "classes": ["cat", "dog"],
}


def test_samples_are_counted() -> None:
    """Samples are counted by the first tensor with rows, otherwise by the first list of objects."""
    assert count_rows(BATCH) == 3
    assert count_rows({"loss": torch.tensor(1.0), "x": torch.ones(5, 2)}) == 5
    assert count_rows({"a": "text", "b": ["x", "y"]}) == 2
    assert count_rows([1, 2, 3]) == 3
    assert count_rows({"a": "text"}) is None


def test_a_cut_leaves_what_belongs_to_the_whole_batch() -> None:
    """Tensors and lists with one entry per sample are cut. Other values stay."""
    part = cut_rows(BATCH, slice(1, 3))
    assert part["ids"].tolist() == [[2, 3], [4, 5]]
    assert (part["names"], part["pairs"][1], part["pairs"][0].tolist()) == (["b", "c"], ("y", "z"), [1, 2])
    assert (part["scale"].item(), part["kind"], part["classes"]) == (2.0, "train", ["cat", "dog"])


def test_joining_is_the_opposite_of_cutting() -> None:
    """Joined parts equal the complete batch. Parts that differ in more than rows cannot be joined."""
    whole = join_rows([cut_rows(BATCH, slice(0, 1)), cut_rows(BATCH, slice(1, 3))])
    assert torch.equal(whole["ids"], BATCH["ids"])
    assert {key: whole[key] for key in ("names", "kind", "classes")} == {
        key: BATCH[key] for key in ("names", "kind", "classes")
    }
    assert (whole["pairs"][0].tolist(), whole["pairs"][1]) == ([0, 1, 2], ("x", "y", "z"))
    with pytest.raises(LoopError, match="differ beyond their first dimension"):
        join_rows([torch.ones(2, 3), torch.ones(2, 4)])
