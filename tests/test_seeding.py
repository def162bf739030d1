"""One call seeds every generator."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch

from zero_plugin.seeding import set_seed


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def test_the_same_seed_draws_the_same() -> None:
    """Python, NumPy and torch all repeat, and another seed differs in all three."""
    set_seed(7)
    first = draw()
    set_seed(7)
    assert draw() == first
    set_seed(8)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_a_seed_beyond_numpy_s_range_is_taken() -> None:
    """torch takes 64 bits, NumPy 32; the call takes what torch takes."""
    set_seed(2**40 + 3)
    wide = draw()[1]
    set_seed(3)
    assert draw()[1] == wide


def test_deterministic_makes_torch_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `deterministic`, torch refuses operations that could differ between runs."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    try:
        set_seed(0, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
