"""Optimizers and schedules find their models by their parameters. Impossible pairings are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zero_plugin import DummyOptim, DummyScheduler
from zero_plugin.errors import LoopError
from zero_plugin.loop.prepared import pair_models


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)


def test_each_model_gets_its_own() -> None:
    """Any order and a placeholder work. A model without an optimizer is not trained."""
    one, two, teacher = nn.Linear(2, 2), nn.Linear(3, 3), nn.Linear(4, 4)
    first = sgd(one)
    second = DummyOptim([{"params": list(two.parameters()), "lr": 0.1}])
    schedules = [DummyScheduler(second), torch.optim.lr_scheduler.LambdaLR(first, lambda _: 1.0)]
    pairs = pair_models([teacher, one, two], [second, first], schedules, [])
    assert [pair.model for pair in pairs] == [teacher, one, two]
    assert [pair.optimizer for pair in pairs] == [None, first, second]
    assert [pair.schedulers for pair in pairs] == [(), (schedules[1],), (schedules[0],)]


def test_what_cannot_be_paired() -> None:
    """An optimizer of no model, of several, or of a foreign one; two of one model; models that share parameters."""
    one, two = nn.Linear(2, 2), nn.Sequential(nn.Linear(3, 3))
    cases: list[tuple[list[nn.Module], list[Any], list[nn.Module], str]] = [
        ([one, two], [sgd(one, two)], [], "several models"),
        ([one, two], [sgd(nn.Linear(1, 1))], [], "2 parameters \\(of 2\\) that are not the model's.\n"),
        ([one, two], [sgd(nn.Linear(1, 1, device="meta"))], [], "are on meta, the model.s on cpu: the model was moved"),
        ([one], [sgd(one), sgd(one)], [], "two optimizers"),
        ([two, two[0]], [], [], "shares parameters"),
        ([two[0]], [], [two], "shares parameters"),
    ]
    for models, optimizers, prepared, words in cases:
        with pytest.raises(LoopError, match=words):
            pair_models(models, optimizers, [], prepared)


@pytest.mark.parametrize(
    ("places", "refused"),
    [({"": 0}, False), ({"a": 0, "b": 0}, False), ({"a": 0, "b": 1}, True), ({"": "disk"}, True)],
)
def test_a_model_spread_over_devices(places: dict[str, Any], refused: bool) -> None:
    """One device is fine, since the model is moved from there. Several are an error."""
    model: Any = nn.Linear(2, 2)
    model.hf_device_map = places
    if not refused:
        assert pair_models([model], [], [], [])[0].model is model
        return
    with pytest.raises(LoopError, match="device_map"):
        pair_models([model], [], [], [])
