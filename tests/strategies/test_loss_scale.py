"""Without DeepSpeed, the loss scale moves as DeepSpeed's own does."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from zero_plugin.strategies.deepspeed.session import EngineSession
from zero_plugin.strategies.precision import DEFAULT_MOST_SKIPS, LossScale

SECTIONS: list[dict[str, Any]] = [
    {},
    {"initial_scale_power": 5, "loss_scale_window": 3},
    {"initial_scale_power": 5, "loss_scale_window": 3, "hysteresis": 1},
    {"initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 3, "consecutive_hysteresis": True},
    {"initial_scale_power": 3, "loss_scale_window": 4, "min_loss_scale": 2},
]


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("seed", range(4))
def test_it_equals_deepspeeds(section: dict[str, Any], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale is the same before each of 200 steps. Some of them, also several in a row, are skipped."""
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 1)
    theirs = DynamicLossScaler(
        init_scale=2 ** section.get("initial_scale_power", 16),
        scale_window=section.get("loss_scale_window", 1000),
        min_scale=section.get("min_loss_scale", 1),
        delayed_shift=section.get("hysteresis", 2),
        consecutive_hysteresis=section.get("consecutive_hysteresis", False),
        raise_error_at_min_scale=False,
        dtype=torch.half,
    )
    ours, chance = LossScale(section), random.Random(seed)
    skipped = False
    for _ in range(200):
        assert ours.value == theirs.cur_scale
        skipped = chance.random() < (0.6 if skipped else 0.15)
        ours.update(skipped=skipped)
        theirs.update_scale(skipped)


def test_a_fixed_scale_stays() -> None:
    """`loss_scale: 128` stays 128, whatever is skipped."""
    scale = LossScale({"loss_scale": 128.0})
    for skipped in (True, False, True):
        scale.update(skipped=skipped)
    assert scale.value == 128


@pytest.mark.parametrize("section", [*SECTIONS, {"initial_scale_power": 0}])
def test_most_skips_reach_the_smallest_scale(section: dict[str, Any]) -> None:
    """As many skips in a row happen as DeepSpeed allows before it ends the run at its smallest scale."""
    scale = LossScale(section)
    theirs = DynamicLossScaler(
        init_scale=scale.value,
        scale_window=1000,
        min_scale=section.get("min_loss_scale", 1),
        delayed_shift=section.get("hysteresis", 2),
        consecutive_hysteresis=False,
    )
    theirs.cur_scale = scale.value
    import deepspeed.comm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepspeed.comm, "get_rank", lambda: 1)
        for _ in range(scale.most_skips - 1):
            theirs.update_scale(True)
        with pytest.raises(Exception, match="already at minimum"):
            theirs.update_scale(True)
    assert LossScale({}).most_skips == DEFAULT_MOST_SKIPS == 18


@pytest.mark.parametrize("forgets", [True, False])
def test_stage_0_is_scaled_once(forgets: bool) -> None:
    """The loss of stage 0's fp16 optimizers, on GPUs only, is scaled once, whether or not DeepSpeed scales it."""
    session = object.__new__(EngineSession)
    session.scales_loss = True
    optimizer = SimpleNamespace(loss_scale=8.0)
    session.engine = SimpleNamespace(
        optimizer=optimizer,
        torch_autocast_z0_gradscaler=None,
        scale=lambda loss: loss if forgets else loss * optimizer.loss_scale,
    )
    assert session.scale_loss(torch.tensor(3.0, requires_grad=True).clone()).item() == 24.0
    assert session.scale_loss(torch.ones(2, requires_grad=True).clone()).tolist() == [8.0, 8.0]


def test_the_installed_deepspeed_forgets_to_scale_at_stage_0() -> None:
    """Its `scale` returns the loss itself.

    Once a release scales again, the factor in `EngineSession.scale_loss` can go.
    """
    engine = SimpleNamespace(optimizer=object(), torch_autocast_z0_gradscaler=None)
    loss = torch.ones((), requires_grad=True).clone()
    assert DeepSpeedEngine.scale(engine, loss) is loss
