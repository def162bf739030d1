"""Random states that are loaded on another number of processes."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from zero_plugin.checkpoint.objects import random_state, restore_random_state
from zero_plugin.distributed.seeding import set_seed


def draw() -> list[float]:
    """Draw one number from each generator."""
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def saved_and_drawn(seeds: list[int]) -> tuple[list[dict[str, object]], list[list[float]]]:
    """Return the states of processes with these seeds, and their next draws."""
    states, drawn = [], []
    for seed in seeds:
        set_seed(seed)
        states.append(random_state())
        drawn.append(draw())
    return states, drawn


def test_a_known_process_goes_on() -> None:
    """Each process of the saved run draws the numbers that it would have drawn."""
    states, drawn = saved_and_drawn([1, 2])
    for rank in (0, 1):
        assert restore_random_state(states, rank) is None
        assert draw() == drawn[rank]


def test_an_objects_own_generator_goes_on() -> None:
    """An object's own generator continues from its saved state. Older checkpoints leave the generator unchanged."""
    then, now = torch.Generator().manual_seed(3), torch.Generator()
    states = [random_state([None, then])]
    assert restore_random_state(states, 0, [None, now]) is None
    assert torch.equal(now.get_state(), then.get_state())
    del states[0]["own"]
    assert restore_random_state(states, 0, [None, now.manual_seed(4)]) is None
    assert now.initial_seed() == 4


@pytest.mark.parametrize("is_used", [False, True])
def test_a_gpu_that_is_not_used(is_used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unused CUDA device, as in a CPU run, is not queried, and no context is created."""
    asked: list[Tensor] = []

    def ask() -> Tensor:
        asked.append(torch.ones(1))
        return asked[0]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_used)
    monkeypatch.setattr(torch.cuda, "get_rng_state", ask)
    assert (random_state()["cuda"] is not None) == bool(asked) == is_used


def test_a_new_process_draws_as_all_did() -> None:
    """If all processes drew the same, a new process does too, and a message says so."""
    states, drawn = saved_and_drawn([1, 1])
    said = restore_random_state(states, 2)
    assert said is not None
    assert "draws like the others" in said
    assert draw() == drawn[0]


@pytest.mark.parametrize("ranks", [(2, 3), (2, 4)])
def test_new_processes_are_seeded_apart(ranks: tuple[int, int]) -> None:
    """If processes drew differently, new ones do too, the same at each load, and a message says so."""
    states, drawn = saved_and_drawn([1, 2])
    results = []
    for rank in (*ranks, ranks[0]):
        said = restore_random_state(states, rank)
        assert said is not None
        assert "is seeded with" in said
        results.append(draw())
    assert results[0] == results[2]
    assert len({tuple(result) for result in (*results[:2], *drawn)}) == 4
