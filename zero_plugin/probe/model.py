"""Reads from a model's configuration and parameter shapes what resolution needs to know of it."""

from __future__ import annotations

import math

from torch import nn

from zero_plugin.probe.width import common_width, stated_width
from zero_plugin.resolve.facts import ModelFacts

__all__ = ["probe_model"]


def probe_model(model: nn.Module) -> ModelFacts:
    """Sizes of `model`, without touching its data; partitioned parameters (`ds_shape`) count with their whole shape.

    The hidden size is the one that the model's `config` (or its `text_config`, …) states, else the most common
    dimension of its matrices. A parameter shared by several modules counts once.
    """
    shapes = [tuple(getattr(parameter, "ds_shape", parameter.shape)) for parameter in model.parameters()]
    sizes = [math.prod(shape) for shape in shapes]
    hidden, reason = stated_width(getattr(model, "config", None), "model.config")
    if hidden is None:
        hidden, reason = common_width(shapes)
    return ModelFacts(hidden, reason, max(sizes, default=0), sum(sizes))
