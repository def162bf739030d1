"""Reads from a model's configuration and parameter shapes what resolution needs to know of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn

from zero_plugin.resolve.facts import ModelFacts

__all__ = ["probe_model"]

# The names under which model configurations keep the width of their residual stream, and under which they nest others.
_WIDTHS = ("hidden_size", "hidden_sizes", "d_model", "n_embd", "n_embed", "embed_dim", "hidden_dim", "model_dim", "dim")
_NESTED = ("text_config", "llm_config", "language_config", "decoder", "encoder", "vision_config")


def probe_model(model: nn.Module) -> ModelFacts:
    """Sizes of `model`, without touching its data; partitioned parameters (`ds_shape`) count with their whole shape.

    The hidden size is the one that the model's `config` (or its `text_config`, …) states, else the most common
    dimension of its matrices. A parameter shared by several modules counts once.
    """
    shapes = [tuple(getattr(parameter, "ds_shape", parameter.shape)) for parameter in model.parameters()]
    sizes = [_elements(shape) for shape in shapes]
    hidden, reason = _stated_width(getattr(model, "config", None), "model.config")
    if hidden is None:
        hidden, reason = _common_width(shapes)
    return ModelFacts(hidden, reason, max(sizes, default=0), sum(sizes))


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def _stated_width(config: Any, path: str) -> tuple[int | None, str]:
    """The width that `config`, an object or a mapping, states itself or in a nested configuration."""
    if config is None:
        return None, ""
    for name in _WIDTHS:
        value = _member(config, name)
        if isinstance(value, list | tuple) and value and all(isinstance(v, int) for v in value):
            return max(value), f"the largest of {path}.{name}"
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value, f"{path}.{name}"
    for name in _NESTED:
        found, reason = _stated_width(_member(config, name), f"{path}.{name}")
        if found is not None:
            return found, reason
    return None, ""


def _member(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _common_width(shapes: list[tuple[int, ...]]) -> tuple[int | None, str]:
    """The most common dimension of the matrices, the larger one of equals."""
    counts = Counter(length for shape in shapes if len(shape) == 2 for length in set(shape))
    if not counts:
        return None, ""
    width = max(counts, key=lambda length: (counts[length], length))
    return width, f"the most common dimension of the model's matrices ({counts[width]} of them)"
