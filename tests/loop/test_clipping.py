"""Clipping has one owner: a model's window decides at which norm its step is clipped."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from zero_plugin import Accelerator, DeepSpeedPlugin
from zero_plugin.errors import ConfigError
from zero_plugin.loop.window import Phase, Window
from zero_plugin.strategies.precision import Measured


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    one = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=2, gradient_clipping="auto"))
    yield one
    one.end_training()
    one.free_memory()


def test_a_norm_that_is_configured_between_two_calls_of_prepare_counts(accelerator: Any) -> None:
    """A norm that is configured after the model's first step, when the loader is prepared, applies to later steps."""
    model = nn.Linear(4, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))

    def step(max_norm: float | None) -> float:
        before = model.module.weight.detach().clone()
        accelerator.backward(model(torch.full((1, 4), 5.0)).sum())
        if max_norm is not None:
            accelerator.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return float((model.module.weight.detach() - before).norm())

    assert step(1.0) == pytest.approx(1.0, rel=1e-4)
    assert step(None) == pytest.approx(10.0, rel=1e-4)
    accelerator.state.deepspeed_plugin.deepspeed_config["gradient_clipping"] = 0.5
    accelerator.prepare(torch.utils.data.DataLoader(torch.ones(4, 4)))
    assert step(None) == pytest.approx(0.5, rel=1e-4)
    with pytest.raises(ConfigError, match=r"1\.0 in code, but 0\.5 at"):
        step(1.0)


def test_the_norm_of_a_step() -> None:
    """The norm is the configured one until the script clips. Then the script's clipping decides."""
    window = Window(1)
    assert window.step_norm == math.inf
    window.clipping = 2.0
    for phase in (Phase.ACCUMULATED, Phase.COMPLETE):
        window.enter(phase)
        assert window.step_norm == 2.0
    window.measured = Measured(limit=0.5)
    window.enter(Phase.CLIPPED)
    assert window.step_norm == 0.5
    window.measured = Measured()
    assert window.step_norm == math.inf
