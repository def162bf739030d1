"""Parameters of any shape under ZeRO stage 3.

DeepSpeed broadcasts the bytes of parameters as `p.data.view(torch.uint8)`. This fails for scalar parameters, such as
CLIP's `logit_scale`, and for parameters that are not contiguous, such as a convolution's in channels_last. The wrappers
in this module make these broadcasts work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import MethodType
from typing import Any

import torch
from deepspeed import DeepSpeedEngine, zero
from torch import nn

from zero_plugin.strategies.deepspeed.partitioned_models import (
    NOTES_WRITTEN,
    copy_unpartitioned,
    describe_unprepared,
    do_nothing,
    refuse_forwards_of,
)
from zero_plugin.strategies.deepspeed.patches import Patches, replaced


def broadcasting_any_shape() -> AbstractContextManager[None]:
    """Let a new engine broadcast parameters of any shape and memory format, which become contiguous."""
    broadcast = _wrapped(DeepSpeedEngine._broadcast_model, lambda engine: engine.module.parameters())
    return replaced(DeepSpeedEngine, "_broadcast_model", broadcast)


@functools.cache  # once in a process
def partition_any_shape() -> None:
    """Make `zero.Init` and `zero.GatheredParameters` support parameters of any shape and memory format.

    The patch is global, because transformers constructs and loads models through these classes. It only affects
    parameters for which they would raise, and forwards of unprepared models, which would fail at empty tensors.
    """
    patches, leave = Patches(), _wrapped(zero.GatheredParameters.__exit__, _to_send)

    @functools.wraps(leave)
    def leave_and_note(gathered: Any, *args: Any) -> None:
        leave(gathered, *args)
        notes: set[Any] = {getattr(p, NOTES_WRITTEN, do_nothing) for p in _to_send(gathered)}
        for note in notes:
            note()

    patches.replace(zero.GatheredParameters, "__exit__", leave_and_note)
    partition = zero.Init._zero_init_param

    @functools.wraps(partition)
    def partition_any(init: Any, parameter: Any) -> None:
        shape = parameter.shape
        with _as_contiguous_1d([parameter]):
            partition(init, parameter)
        parameter.ds_shape = shape  # the shape after a gather
        patches.replace(parameter, "__deepcopy__", MethodType(copy_unpartitioned, parameter))

    patches.replace(zero.Init, "_zero_init_param", partition_any)
    after_construction = zero.Init._post_init_method

    @functools.wraps(after_construction)
    def partition_and_refuse(init: Any, module: nn.Module) -> None:
        after_construction(init, module)
        refuse_forwards_of(module, describe_unprepared)

    patches.replace(zero.Init, "_post_init_method", partition_and_refuse)


def _wrapped(own: Callable[..., Any], parameters_of: Callable[[Any], Iterable[nn.Parameter]]) -> Callable[..., Any]:
    @functools.wraps(own)
    def call(self: Any, *args: Any) -> Any:
        with _as_contiguous_1d(parameters_of(self)):
            return own(self, *args)

    return call


def _to_send(gathered: Any) -> Iterable[nn.Parameter]:
    parameters: Iterable[nn.Parameter] = gathered.params if gathered.enabled and gathered.src_rank is not None else ()
    return parameters


@contextmanager
def _as_contiguous_1d(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Make scalar parameters 1-dimensional, and all parameters contiguous, as DeepSpeed's broadcast requires.

    Scalars get their shape back on exit.
    """
    scalars = []
    for p in parameters:
        if p.data.dim() == 0:
            scalars.append(p)
            p.data = p.data.view(1)
        elif not p.data.is_contiguous():
            p.data = p.data.contiguous()
    try:
        yield
    finally:
        for p in scalars:
            if p.data.shape == torch.Size([1]):  # False if it was partitioned inside
                p.data = p.data.view(())
