"""What a loop may pass to a model's forward, guessed from one of its batches."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from zero_plugin.probe.activations import Example

__all__ = ["forward_arguments"]


def forward_arguments(model: nn.Module, batch: Any) -> Iterator[Example]:
    """The likeliest first: those of the batch's keys that the forward knows; or its items, without the last, the first.

    Args:
        model: whose forward.
        batch: as a loader gives it; None gives nothing.
    """
    if isinstance(batch, Mapping):
        known = inspect.signature(model.forward).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
        yield {name: value for name, value in batch.items() if takes_any or name in known}
        yield from ((value,) for value in list(batch.values())[:1])
    elif isinstance(batch, list | tuple):
        yield list(batch)
        if len(batch) > 1:
            yield list(batch[:-1])  # the last one is what the loss compares with
            yield [batch[0]]
    elif batch is not None:
        yield [batch]
