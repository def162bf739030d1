"""The example in the docstring of each extension point runs, and does what its sentence says."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler

from zero_plugin import Accelerator
from zero_plugin.data.batch_sampler import BatchSamplerShard
from zero_plugin.errors import LoopError
from zero_plugin.strategies.events import Guard
from zero_plugin.strategies.torch_session import TorchSession
from zero_plugin.strategies.torch_strategies import TorchStrategy
from zero_plugin.trackers.trackers import GeneralTracker


@pytest.fixture
def names() -> Iterator[dict[str, Any]]:
    """Return the names that the examples use and define."""
    found: dict[str, Any] = {
        "Accelerator": Accelerator,
        "DataLoader": DataLoader,
        "GeneralTracker": GeneralTracker,
        "Guard": Guard,
        "LoopError": LoopError,
        "Sampler": Sampler,
        "TorchSession": TorchSession,
        "TorchStrategy": TorchStrategy,
    }
    yield found
    if "accelerator" in found:
        found["accelerator"].end_training()


def run_example(kind: type, names: dict[str, Any]) -> None:
    """Run the code after the word Example in the docstring of a class."""
    lines = inspect.cleandoc(kind.__doc__ or "").splitlines()
    (first,) = [number for number, line in enumerate(lines) if "Example, " in line]
    first += next(number for number, line in enumerate(lines[first:]) if not line)
    code = []
    for line in lines[first:]:
        if line and not line.startswith("    "):
            break
        code.append(line)
    exec(textwrap.dedent("\n".join(code)), names)


def test_a_tracker_of_ones_own_gets_the_values(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """The example tracker prints the values."""
    run_example(GeneralTracker, names)
    assert "[(1, {'loss': 0.5})]" in capsys.readouterr().out


def test_a_guard_of_ones_own_raises(names: dict[str, Any]) -> None:
    """The example guard raises in the backward of the mistake that it detects."""
    run_example(Guard, names)
    run = names["accelerator"]
    layer = nn.Linear(2, 1)
    model, _ = run.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    with pytest.raises(LoopError, match="the loss is not finite"):
        run.backward(model(torch.full((1, 2), float("inf"))).sum())


def test_a_strategy_of_ones_own_steps_its_way(names: dict[str, Any]) -> None:
    """The example strategy moves each weight by the learning rate."""
    run_example(TorchStrategy, names)
    run = names["accelerator"]
    layer = nn.Linear(2, 1, bias=False)
    before = layer.weight.detach().clone()
    model, optimizer = run.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    run.backward(model(torch.tensor([[3.0, -5.0]])).sum())
    optimizer.step()
    assert torch.allclose(layer.weight - before, torch.tensor([[-0.1, 0.1]]))


def test_a_sampler_of_ones_own_gives_the_order(names: dict[str, Any]) -> None:
    """The example sampler gives the longest samples first."""
    names["accelerator"] = Accelerator()
    run_example(BatchSamplerShard, names)
    assert [batch.tolist() for batch in names["loader"]] == [[9, 7], [4, 3]]
