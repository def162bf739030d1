"""Unwrap models (DDP, a DeepSpeed engine, `torch.compile`, a 16-bit forward) and find the tensors that a loss reaches.

Also apply `torch.compile` to a model's repeated blocks one by one, so the compiler runs once for all equal blocks.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import DataParallel, DistributedDataParallel

from zero_plugin.config.handlers import TorchDynamoPlugin

Forward = Callable[..., Any]


def extract_model(
    model: nn.Module, *, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """Return the model inside DDP, DataParallel or an engine.

    Args:
        model: the model, wrapped or not.
        keep_fp32_wrapper: leave the forward as it is. False removes decorators from the forward, so the model can be
            pickled.
        keep_torch_compile: for a compiled model, return the compiled wrapper around the inner model.
        recursive: unwrap submodules too.
    """
    compiled = model if "_orig_mod" in model.__dict__ or is_compiled_module(model) else None
    inner: Any = model if compiled is None else compiled._orig_mod
    wrappers = _wrappers()
    while isinstance(inner, wrappers):
        inner = inner.module
    if recursive:
        inner = _unwrap_children(inner)
    if not keep_fp32_wrapper:
        inner.__dict__.pop("_original_forward", None)
        _set_forward(inner, _own_forward(inner))  # drop the forward that decorators wrapped around its own
    if compiled is None or not keep_torch_compile:
        return inner  # type: ignore[no-any-return]
    if is_compiled_module(compiled):
        compiled._orig_mod = inner
    else:
        compiled.__dict__["_orig_mod"] = inner
    return compiled


def load_plain(module: nn.Module, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Call `load_state_dict` of an unwrapped module; the names may be a wrapper's, with the prefix `module.`."""
    state = copy.copy(state_dict)  # `copy` keeps the attribute `_metadata`, which holds the modules' versions
    if not hasattr(module, "module") and all(name.startswith("module.") for name in state):
        consume_prefix_in_state_dict_if_present(cast(dict[str, Any], state), "module.")
    return module.load_state_dict(state, *args, **kwargs)


def bare_copy(model: nn.Module) -> nn.Module:
    """Return a shallow copy, not compiled and without decorators around its forward; e.g. to pickle the model."""
    twin = copy.copy(model)  # drops the compiled call that `Module.compile` set
    _set_forward(twin, _own_forward(twin))
    return twin


def _wrappers() -> tuple[Any, ...]:
    engine = getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", None)  # no engine before deepspeed is imported
    return (DistributedDataParallel, DataParallel, *([engine] if engine is not None else []))


def _unwrap_children(module: Any) -> Any:
    while isinstance(getattr(module, "module", None), nn.Module):
        module = module.module
    for name, child in module.named_children():
        setattr(module, name, _unwrap_children(child))
    return module


def _own_forward(model: nn.Module) -> Any:
    """Return the forward that was set on this object, without decorators; None if it is the class's forward.

    Decorators are recognized by their `__wrapped__`.
    """
    forward: Any = model.__dict__.get("forward")
    bound = False
    while forward is not None:
        bound |= isinstance(forward, MethodType)
        function = getattr(forward, "__func__", forward)
        if function is type(model).forward:
            return None
        if not hasattr(function, "__wrapped__"):
            return MethodType(function, model) if bound else forward
        forward = function.__wrapped__
    return None


def _set_forward(model: nn.Module, forward: Any) -> None:
    model.__dict__.pop("forward", None)
    if forward is not None:
        model.__dict__["forward"] = forward


def wrap_forward(module: nn.Module, around: Callable[..., Any]) -> Callable[[], None]:
    """Make `module.forward(…)` call `around(forward, …)`.

    The signature stays the same, because transformers reads it. A copy of the module computes with the copy's weights.

    Returns:
        A function that restores the forward.
    """
    own = module.__dict__.get("forward")  # set on this object by the script or by a library

    def wrapped(forward: Forward) -> Forward:
        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            return around(forward, *args, **kwargs)

        return call

    placed: Forward
    if own is None:
        placed = MethodType(wrapped(type(module).forward), module)  # a method, since `copy` binds methods to the copy
    elif isinstance(own, MethodType) and own.__self__ is module:
        placed = MethodType(wrapped(own.__func__), module)
    else:
        placed = wrapped(own)
    module.forward = placed

    def undo() -> None:
        if module.__dict__.get("forward") is not placed:
            return  # the script has wrapped or replaced the forward since then
        if own is None:
            del module.forward
        else:
            module.forward = own

    return undo


def find_leaves(loss: Tensor) -> list[Tensor]:
    """Return the leaves of a loss's graph, which receive gradients; works after the backward too.

    Walks the complete graph, which takes milliseconds for a large model.
    """
    found: list[Tensor] = []
    pending = [loss.grad_fn]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if node is None:
            continue
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.append(leaf)
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                pending.append(following)
    return found


def is_compiled_module(module: nn.Module) -> bool:
    """Return whether the module is a result of `torch.compile(module)`."""
    return isinstance(module, torch._dynamo.OptimizedModule)


def has_compiled_regions(module: nn.Module) -> bool:
    """Return whether the module or one of its submodules is a result of `torch.compile`."""
    return any(map(is_compiled_module, module.modules()))


def compile_in_place(module: nn.Module, plugin: TorchDynamoPlugin) -> None:
    """Compile the module with `Module.compile`.

    With `use_regional_compilation`, compile each block of its `ModuleList`s instead, or the complete module if no
    `ModuleList` has blocks of one class. The module stays the same object: it can be wrapped, saved and unwrapped as
    before.
    """
    blocks = [block for part in module.modules() if _repeats(part) for block in part.children()]
    for part in blocks if plugin.use_regional_compilation and blocks else [module]:
        if not is_compiled_module(part):
            part.compile(**plugin.to_kwargs())


def without_wrappers(module: nn.Module) -> nn.Module:
    """Replace each `torch.compile` wrapper, outside or inside, by its module, compiled in place. Return the module.

    A wrapper of `torch.compile` puts `_orig_mod.` into the names of a checkpoint. Stage 3 replaces `_parameters` of
    every module; the wrapper forwards this assignment to its inner module, which then loses its own parameters.
    """
    for part in list(module.modules()):
        for name, child in part.named_children():
            if is_compiled_module(child):
                setattr(part, name, _compiled_inside(child))
    return _compiled_inside(module) if is_compiled_module(module) else module


def _compiled_inside(wrapper: Any) -> nn.Module:
    """Return the inner module. Its calls are compiled with the wrapper's settings."""
    inner: Any = wrapper._orig_mod

    # torch's compiler skips a direct call of torch's own modules. It does compile this function, which makes the call.
    def call(*args: Any, **kwargs: Any) -> Any:
        return inner._call_impl(*args, **kwargs)

    call.__code__ = call.__code__.replace()  # a separate code object: the compiler caches at most eight graphs for each
    inner._compiled_call_impl = wrapper.dynamo_ctx(call)
    return cast(nn.Module, inner)


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Return a shallow copy of `module` with compiled parts. The copy shares the parameters.

    A `ModuleList` of modules of one class is compiled item by item. A module without one is compiled as a whole.

    Args:
        module: is not changed; the result keeps a reference to it as `_orig_mod`.
        **compile_kwargs: arguments of `torch.compile`.
    """
    compiled = _compile_parts(module, compile_kwargs, {})
    if "_orig_mod" not in compiled.__dict__ and not is_compiled_module(compiled):
        compiled.__dict__["_orig_mod"] = module  # not a submodule: its parameters would count twice
    return compiled


def _compile_parts(module: nn.Module, compile_kwargs: dict[str, Any], known: dict[nn.Module, nn.Module]) -> nn.Module:
    """Return the compiled copy of a part, from `known` if the part was met under another name."""
    if module not in known:
        known[module] = _compiled_parts(module, compile_kwargs, known)
    return known[module]


def _compiled_parts(module: nn.Module, compile_kwargs: dict[str, Any], known: dict[nn.Module, nn.Module]) -> nn.Module:
    if _repeats(module):
        return nn.ModuleList([_compile(block, compile_kwargs) for block in module.children()])
    if not any(map(_repeats, module.modules())):
        return _compile(module, compile_kwargs)
    twin = copy.copy(module)
    twin.__dict__["_modules"] = {
        name: None if child is None else _compile_parts(child, compile_kwargs, known)
        for name, child in module._modules.items()
    }
    for name, value in module.__dict__.items():
        if isinstance(value, MethodType) and value.__self__ is module:  # e.g. a forward that was replaced
            twin.__dict__[name] = MethodType(value.__func__, twin)
    return twin


def _compile(module: nn.Module, compile_kwargs: dict[str, Any]) -> nn.Module:
    compiled: nn.Module = torch.compile(module, **compile_kwargs)  # type: ignore[assignment]  # of a module, a module
    return compiled


def _repeats(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList) and len(module) > 0 and len({type(block) for block in module}) == 1
