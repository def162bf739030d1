"""`torch.compile` for a model's repeated blocks, one by one: the compiler works once for all that are alike."""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import torch
from torch import nn

from zero_plugin.config.plugins import TorchDynamoPlugin


def is_compiled_module(module: nn.Module) -> bool:
    """Whether it is what `torch.compile(module)` returns."""
    return isinstance(module, torch._dynamo.OptimizedModule)


def has_compiled_regions(module: nn.Module) -> bool:
    """Whether it, or a module inside it, is what `torch.compile` returns."""
    return any(map(is_compiled_module, module.modules()))


def compile_in_place(module: nn.Module, how: TorchDynamoPlugin) -> None:
    """Compile the module's calls, or under `use_regional_compilation` those of its repeated blocks, and nothing else.

    The module stays the same object, so that it can be wrapped, saved and unwrapped as before.
    """
    blocks = [block for part in module.modules() if _repeats(part) for block in part.children()]
    for part in blocks if how.use_regional_compilation and blocks else [module]:
        if not is_compiled_module(part):
            part.compile(**how.to_kwargs())


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """A model like `module`, with the same parameters, whose parts are compiled.

    A `ModuleList` of modules of one class is compiled item by item, what has no such list inside as a whole.

    Args:
        module: stays as it is; the result keeps it as `_orig_mod`.
        **compile_kwargs: for `torch.compile`.
    """
    compiled = _compile_parts(module, compile_kwargs)
    if "_orig_mod" not in compiled.__dict__ and not is_compiled_module(compiled):
        compiled.__dict__["_orig_mod"] = module  # not a submodule: its parameters would count twice
    return compiled


def _compile_parts(module: nn.Module, compile_kwargs: dict[str, Any]) -> nn.Module:
    if _repeats(module):
        return nn.ModuleList([_compile(block, compile_kwargs) for block in module.children()])
    if not any(map(_repeats, module.modules())):
        return _compile(module, compile_kwargs)
    twin = copy.copy(module)
    twin.__dict__["_modules"] = {name: _compile_parts(child, compile_kwargs) for name, child in module.named_children()}
    for name, value in module.__dict__.items():
        if isinstance(value, MethodType) and value.__self__ is module:  # e.g. a forward that was replaced
            twin.__dict__[name] = MethodType(value.__func__, twin)
    return twin


def _compile(module: nn.Module, compile_kwargs: dict[str, Any]) -> nn.Module:
    compiled: nn.Module = torch.compile(module, **compile_kwargs)  # type: ignore[assignment]  # of a module, a module
    return compiled


def _repeats(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList) and len(module) > 0 and len({type(block) for block in module}) == 1
