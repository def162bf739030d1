"""Build a model without memory for its parameters, or with its parameters on a given device."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from zero_plugin.config.choices import parse_flag_from_env
from zero_plugin.config.installed import replaced
from zero_plugin.tensors.modules import parameter_like


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Build modules with parameters on the meta device: shapes and dtypes, no values, no memory.

    `load_checkpoint_and_dispatch` loads the values.

    Args:
        include_buffers: whether buffers are on the meta device too. Default: ACCELERATE_INIT_INCLUDE_BUFFERS, or False,
            because checkpoints lack the buffers that a model computes when it is built (positions, masks).
    """
    with init_on_device(torch.device("meta"), include_buffers=include_buffers):
        yield


@contextmanager
def init_on_device(device: int | str | torch.device, include_buffers: bool | None = None) -> Iterator[None]:
    """Build modules with parameters on `device`; each parameter moves there as soon as a module registers it.

    Shared weights stay shared.

    Args:
        device: the target.
        include_buffers: whether all tensors made inside, buffers too, are on `device`. Default as in
            `init_empty_weights`.
    """
    if include_buffers is None:
        include_buffers = parse_flag_from_env("ACCELERATE_INIT_INCLUDE_BUFFERS", False)
    target = torch.device(device)
    if include_buffers:
        with target:
            yield
        return
    register = nn.Module.register_parameter
    moved = WeakIdKeyDictionary()  # original parameter → moved one, for further modules that share the parameter

    def register_moved(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None and param.device != target:
            if param not in moved:
                moved[param] = parameter_like(param, param.to(target))
            module._parameters[name] = moved[param]

    with replaced(nn.Module, "register_parameter", register_moved):
        yield


@contextmanager
def outermost_modules() -> Iterator[list[nn.Module]]:
    """Collect the outermost modules that are built inside. The list is filled when the context ends."""
    initialize = nn.Module.__init__
    made: list[weakref.ref[nn.Module]] = []
    outermost: list[nn.Module] = []

    def initialize_noted(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        initialize(module, *args, **kwargs)
        made.append(weakref.ref(module))

    with replaced(nn.Module, "__init__", initialize_noted):
        yield outermost
    if len(_unheld(made)) > 1:
        gc.collect()  # temporary modules may still be alive through reference cycles
    outermost.extend(_unheld(made))


def _unheld(made: Sequence[weakref.ref[nn.Module]]) -> list[nn.Module]:
    alive = [module for reference in made if (module := reference()) is not None]
    held = {id(child) for module in alive for child in module.children()}
    return [module for module in alive if id(module) not in held]
