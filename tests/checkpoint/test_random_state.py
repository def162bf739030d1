"""Random states among other numbers of processes."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from zero_plugin.checkpoint.objects import random_state, restore_random_state
from zero_plugin.distributed.seeding import set_seed


def draw() -> list[float]:
    """One number of each generator."""
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def saved_and_drawn(seeds: list[int]) -> tuple[list[dict[str, object]], list[list[float]]]:
    """The states of processes with these seeds, and what they draw next."""
    states, drawn = [], []
    for seed in seeds:
        set_seed(seed)
        states.append(random_state())
        drawn.append(draw())
    return states, drawn


def test_a_known_process_goes_on() -> None:
    """Each process that was there draws what it would have drawn."""
    states, drawn = saved_and_drawn([1, 2])
    for rank in (0, 1):
        assert restore_random_state(states, rank) is None
        assert draw() == drawn[rank]


def test_an_objects_own_generator_goes_on() -> None:
    """With a checkpoint that has its state; with one of before it stays as it is."""
    then, now = torch.Generator().manual_seed(3), torch.Generator()
    states = [random_state([None, then])]
    assert restore_random_state(states, 0, [None, now]) is None
    assert torch.equal(now.get_state(), then.get_state())
    del states[0]["own"]
    assert restore_random_state(states, 0, [None, now.manual_seed(4)]) is None
    assert now.initial_seed() == 4


@pytest.mark.parametrize("is_used", [False, True])
def test_a_gpu_that_is_not_used(is_used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where CUDA is there and nothing has used it, as in a run on the CPU, it is not asked, and makes no context."""
    asked: list[Tensor] = []

    def ask() -> Tensor:
        asked.append(torch.ones(1))
        return asked[0]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_used)
    monkeypatch.setattr(torch.cuda, "get_rng_state", ask)
    assert (random_state()["cuda"] is not None) == bool(asked) == is_used


def test_a_new_process_draws_as_all_did() -> None:
    """Where all drew alike, a further process does too, and it is said."""
    states, drawn = saved_and_drawn([1, 1])
    said = restore_random_state(states, 2)
    assert said is not None
    assert "draws like the others" in said
    assert draw() == drawn[0]


@pytest.mark.parametrize("ranks", [(2, 3), (2, 4)])
def test_new_processes_are_seeded_apart(ranks: tuple[int, int]) -> None:
    """Where they drew differently, further processes draw differently too, the same at each load, and it is said."""
    states, drawn = saved_and_drawn([1, 2])
    results = []
    for rank in (*ranks, ranks[0]):
        said = restore_random_state(states, rank)
        assert said is not None
        assert "is seeded with" in said
        results.append(draw())
    assert results[0] == results[2]
    assert len({tuple(result) for result in (*results[:2], *drawn)}) == 4
