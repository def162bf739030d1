"""A live model's sizes, without touching its data.

Reads a live model's sizes for the plan, without touching its data.

Reads from a model's configuration and parameter shapes what resolution needs to know of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from torch import Tensor, nn

from zero_plugin.config.resolve.facts import ModelFacts
from zero_plugin.plan.model_facts import common_width, is_expert, stated_width
from zero_plugin.plan.situation import ModelSizes, ParameterSize

_DEPTHS: Final = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


def model_sizes(module: nn.Module) -> ModelSizes:
    """Sizes of `module`, on whatever device it is, `meta` and partitioned (`ds_shape`) included.

    A parameter that several modules share counts once; tensors of one size, all trainable or all frozen, are one entry.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    kinds: Counter[tuple[int, bool, bool, int]] = Counter()
    for name, parameter in module.named_parameters():
        shapes[name] = _shape(parameter)
        elements, width = math.prod(shapes[name]), parameter.element_size()
        kinds[elements, parameter.requires_grad, is_expert(name), width] += 1
    config: Any = getattr(module, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    hidden, _ = stated_width(config, "model.config")
    return ModelSizes(
        name=type(module).__name__,
        parameters=tuple(
            ParameterSize(size, count, trained, expert, width)
            for (size, trained, expert, width), count in kinds.items()
        ),
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in module.buffers()),
        largest_module=max((_own_elements(part.parameters(recurse=False)) for part in module.modules()), default=0),
        hidden_size=hidden or common_width(shapes.values())[0],
        layers=len(repeated_blocks(module)) or _stated(text, _DEPTHS),
        vocabulary=_stated(text, ("vocab_size",)),
        source="the model",
    )


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """The modules that activation checkpointing recomputes one by one: the outermost that stand in a row of their kind.

    A row is a ModuleList or a Sequential that holds at least two modules of one class, which have modules of their own:
    transformer layers, residual blocks.
    """
    found: list[nn.Module] = []
    for child in module.children():
        kinds = Counter(type(block) for block in child.children() if any(True for _ in block.children()))
        is_row = isinstance(child, nn.ModuleList | nn.Sequential) and max(kinds.values(), default=0) > 1
        found += child.children() if is_row else repeated_blocks(child)
    return found


def _own_elements(parameters: Iterable[Tensor]) -> int:
    return sum(math.prod(_shape(parameter)) for parameter in parameters)


def _shape(parameter: Tensor) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _stated(config: Any, names: Iterable[str]) -> int | None:
    for name in names:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


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
