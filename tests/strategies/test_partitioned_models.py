"""Objects that DeepSpeed cannot broadcast change their form for the broadcast only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed import DeepSpeedEngine
from torch import nn

from zero_plugin.strategies.deepspeed.shapes import broadcasting_any_shape


def test_a_scalar_stays_one_when_its_broadcast_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside it has one dimension, afterwards none, as the model's own code expects."""
    module = nn.ParameterList([nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(3, 2).T)])

    def fail(engine: Any) -> None:
        assert [p.shape for p in engine.module] == [(1,), (2, 3)]
        assert all(p.is_contiguous() for p in engine.module)
        raise RuntimeError("a connection is lost")

    monkeypatch.setattr(DeepSpeedEngine, "_broadcast_model", fail)
    with broadcasting_any_shape(), pytest.raises(RuntimeError, match="a connection is lost"):
        DeepSpeedEngine._broadcast_model(SimpleNamespace(module=module))
    assert [p.shape for p in module] == [(), (2, 3)]
