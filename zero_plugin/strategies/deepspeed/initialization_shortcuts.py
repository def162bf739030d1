"""Makes engines at ZeRO stage 3 without the work that DeepSpeed throws away while it initializes them."""

from __future__ import annotations

import inspect
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Final

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import stage3
from deepspeed.runtime.zero.partition_parameters import Init, ZeroParamStatus
from torch import Tensor

__all__ = ["initialization_shortcuts"]

_Stage3: Final = stage3.DeepSpeedZeroOptimizer_Stage3
_make_hooks: Final = _Stage3.create_reduce_and_remove_grad_hooks
_make_states: Final = _Stage3.initialize_optimizer_states
_defragment: Final = stage3.defragment

# Checksum of the functions that are replaced and of those they rely on. Under a release that changed any of them the
# engine is made as DeepSpeed makes it, until somebody has read what changed.
_RELIED_ON: Final[tuple[Callable[..., Any], ...]] = (
    *(_make_hooks, _make_states, _defragment, DeepSpeedEngine._check_for_duplicates),
    *(Init._all_gather, Init._partition, Init._partition_param, stage3.register_grad_hook),
)
_KNOWN: Final = 0x52EF94AC  # as of 0.19.8


@contextmanager
def initialization_shortcuts() -> Iterator[None]:
    """Inside, `deepspeed.initialize` at stage 3 gathers no parameter, collects no garbage and fills no spare buffer."""
    if not _is_as_known():
        yield
        return
    replaced = [(owner, name, getattr(owner, name)) for owner, name, _ in _SHORTCUTS]
    for owner, name, shortcut in _SHORTCUTS:
        setattr(owner, name, shortcut)
    try:
        yield
    finally:
        for owner, name, own in replaced:
            setattr(owner, name, own)


@cache
def _is_as_known() -> bool:
    try:
        # Some are wrapped for a profiler, without saying what is inside.
        inner = [inspect.getclosurevars(function).nonlocals.get("func", function) for function in _RELIED_ON]
        sources = "".join(inspect.getsource(function) for function in inner)
    except OSError:  # installed without sources
        return False
    return zlib.crc32(sources.encode()) == _KNOWN


def _make_hooks_ungathered(optimizer: Any) -> None:
    """DeepSpeed gathers the whole model, one parameter at a time, for hooks that ask for no more than its shape.

    Each parameter is one element in that shape until DeepSpeed drops it, unread since its partition exists. Where nodes
    hold a second copy of the partitions (zero_hpz_partition_size), that is made here of what was gathered.
    """
    gathering = [
        (parameter, parameter.all_gather)
        for group in optimizer.fp16_groups
        for parameter in group
        if parameter.ds_tensor is not None and parameter.ds_zero_param_process_group is None
    ]
    for parameter, _ in gathering:
        parameter.all_gather = partial(_give_shape, parameter)
    try:
        _make_hooks(optimizer)
    finally:
        for parameter, all_gather in gathering:
            parameter.all_gather = all_gather


def _give_shape(parameter: Any) -> None:
    if parameter.ds_status is ZeroParamStatus.NOT_AVAILABLE:
        parameter.data = parameter.data.new_empty(()).expand(parameter.ds_shape)
        parameter.ds_status = ZeroParamStatus.AVAILABLE


def _make_states_if_needed(optimizer: Any) -> None:
    """Without offload it fills a buffer of a partition's size with zeros, and drops it."""
    offloads = optimizer.offload_optimizer or optimizer.offload_param
    if offloads or isinstance(optimizer.optimizer, torch.optim.Adagrad):
        _make_states(optimizer)


def _join_in_one_buffer(tensors: list[Tensor]) -> Tensor:
    """Move flat tensors into one; host memory does not need the garbage collected and the device's cache emptied."""
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return _defragment(tensors)  # type: ignore[no-any-return]
    (dtype,) = {tensor.dtype for tensor in tensors}
    buffer = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=dtype)
    for tensor, part in zip(tensors, torch.split(buffer, [tensor.numel() for tensor in tensors]), strict=True):
        part.copy_(tensor)
        tensor.data = part
    return buffer


def _refuse_duplicates(engine: Any, optimizer: Any) -> None:
    """As DeepSpeed does, in a time that does not grow with the square of the number of parameters."""
    occurrences = Counter(id(p) for group in optimizer.param_groups for p in group["params"])
    for name, parameter in engine.module.named_parameters():
        assert occurrences[id(parameter)] <= 1, f"{name} occurs more than once in the optimizer's groups"


_SHORTCUTS: Final[tuple[tuple[Any, str, Callable[..., Any]], ...]] = (
    (_Stage3, "create_reduce_and_remove_grad_hooks", _make_hooks_ungathered),
    (_Stage3, "initialize_optimizer_states", _make_states_if_needed),
    (stage3, "defragment", _join_in_one_buffer),
    (DeepSpeedEngine, "_check_for_duplicates", _refuse_duplicates),
)
