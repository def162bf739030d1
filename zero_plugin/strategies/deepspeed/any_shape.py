"""Lets DeepSpeed send parameters of any shape and memory format from the first process to the others.

It sends their bytes as `p.data.view(torch.uint8)`, which fails for a parameter of no dimension, such as CLIP's
`logit_scale`, and for one that is not contiguous, such as a convolution's in channels_last.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed import zero
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

__all__ = ["partition_any_shape", "sent_in_any_shape"]


@contextmanager
def sent_in_any_shape() -> Iterator[None]:
    """Inside, an engine that is made sends them. Weights become contiguous: the layout that partitions keep them in."""
    own = DeepSpeedEngine._broadcast_model
    DeepSpeedEngine._broadcast_model = _wrapped(own, lambda engine: engine.module.parameters())
    try:
        yield
    finally:
        DeepSpeedEngine._broadcast_model = own


@functools.cache  # once in a process
def partition_any_shape() -> None:
    """From now on `zero.Init` and `zero.GatheredParameters` do.

    For the whole process, since transformers makes and loads models through these very classes. It changes what they do
    with tensors of such shapes only, for which they would raise.
    """
    zero.GatheredParameters.__exit__ = _wrapped(zero.GatheredParameters.__exit__, _to_send)
    partition = zero.Init._zero_init_param

    @functools.wraps(partition)
    def partition_any(init: Any, parameter: Any) -> None:
        shape = parameter.shape
        with _sendable([parameter]):
            partition(init, parameter)
        parameter.ds_shape = shape  # what it is gathered to

    zero.Init._zero_init_param = partition_any


def _wrapped(own: Callable[..., Any], parameters_of: Callable[[Any], Iterable[nn.Parameter]]) -> Callable[..., Any]:
    @functools.wraps(own)
    def call(self: Any, *args: Any) -> Any:
        with _sendable(parameters_of(self)):
            return own(self, *args)

    return call


def _to_send(gathered: Any) -> Iterable[nn.Parameter]:
    parameters: Iterable[nn.Parameter] = gathered.params if gathered.enabled and gathered.src_rank is not None else ()
    return parameters


@contextmanager
def _sendable(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    scalars = []
    for p in parameters:
        if p.data.dim() == 0:
            scalars.append(p)
            p.data = p.data.view(1)
        elif not p.data.is_contiguous():
            p.data = p.data.contiguous()
    yield
    for p in scalars:
        if p.data.shape == torch.Size([1]):  # else it was partitioned meanwhile
            p.data = p.data.view(())
