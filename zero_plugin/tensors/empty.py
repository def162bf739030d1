"""Build a model whose parameters take no memory, or are made where they will be."""

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
    """Parameters of modules built inside are on the meta device: shapes and types, no values, no memory.

    `load_checkpoint_and_dispatch` gives them values.

    Args:
        include_buffers: buffers too; by default as ACCELERATE_INIT_INCLUDE_BUFFERS says, else no, since buffers that a
            model computes while it is built (positions, masks) are in no checkpoint.
    """
    with init_on_device(torch.device("meta"), include_buffers=include_buffers):
        yield


@contextmanager
def init_on_device(device: int | str | torch.device, include_buffers: bool | None = None) -> Iterator[None]:
    """Parameters of modules built inside are on `device`; each moves there as soon as it is made.

    Weights that modules share stay shared.

    Args:
        device: where to.
        include_buffers: every tensor made inside is there, buffers too; default as in `init_empty_weights`.
    """
    if include_buffers is None:
        include_buffers = parse_flag_from_env("ACCELERATE_INIT_INCLUDE_BUFFERS", False)
    target = torch.device(device)
    if include_buffers:
        with target:
            yield
        return
    register = nn.Module.register_parameter
    moved = WeakIdKeyDictionary()  # parameter as it was made → where it is now, for the second module that gets it

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
    """A list that holds, once the context has ended, the modules made inside that no other module made inside holds."""
    initialize = nn.Module.__init__
    made: list[weakref.ref[nn.Module]] = []
    outermost: list[nn.Module] = []

    def initialize_noted(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        initialize(module, *args, **kwargs)
        made.append(weakref.ref(module))

    with replaced(nn.Module, "__init__", initialize_noted):
        yield outermost
    if len(_unheld(made)) > 1:
        gc.collect()  # those that were for a moment only may hold themselves
    outermost.extend(_unheld(made))


def _unheld(made: Sequence[weakref.ref[nn.Module]]) -> list[nn.Module]:
    alive = [module for reference in made if (module := reference()) is not None]
    held = {id(child) for module in alive for child in module.children()}
    return [module for module in alive if id(module) not in held]
