"""One call seeds every generator."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch
from on_paths import in_processes

from zero_plugin.config.choices import RNGType
from zero_plugin.distributed.collectives import gather_object
from zero_plugin.distributed.seeding import set_seed, synchronize_rng_state, synchronize_rng_states
from zero_plugin.errors import LoopError


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
    """torch takes 64 bits, NumPy 32. The call takes the same seeds as torch."""
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


def test_processes_of_a_launcher_draw_differently_before_they_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """`device_specific` before `Accelerator()` uses the launcher's rank."""
    set_seed(5)
    first = draw()
    monkeypatch.setenv("RANK", "3")
    set_seed(2, device_specific=True)
    assert draw() == first


def test_a_generator_that_is_not_here_is_named() -> None:
    """The error names the kinds that can be synchronised. No kind is ignored."""
    with pytest.raises(LoopError, match=r"'generator'\): this process can synchronise torch"):
        synchronize_rng_state("generator")
    with pytest.raises(LoopError, match="'xla'"):
        synchronize_rng_states(["torch", "xla"])


@in_processes(2)
def test_processes_draw_alike_when_synchronised(rank: int) -> None:
    """The CPU's generator and one of the script's agree. Others keep their own draws."""
    set_seed(0, device_specific=True)
    generator = torch.Generator().manual_seed(rank)
    synchronize_rng_states([RNGType.TORCH, "generator"], generator)
    own = torch.rand(3).tolist(), torch.rand(3, generator=generator).tolist(), random.random()
    first, second = gather_object([own])
    assert first[:2] == second[:2]
    assert first[2] != second[2]
