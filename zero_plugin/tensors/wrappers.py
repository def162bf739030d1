"""Models inside wrappers (DDP, a DeepSpeed engine, `torch.compile`, a 16-bit forward), and what a loss reaches.

Also `torch.compile` for a model's repeated blocks, one by one: the compiler works once for all that are alike.
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
    """The model inside DDP, DataParallel or an engine.

    Args:
        model: wrapped, or not.
        keep_fp32_wrapper: leave its forward as it is; else the class' own comes back, so that it can be pickled.
        keep_torch_compile: of a compiled model, give the compiled one, with the inner model inside.
        recursive: take submodules out of theirs too.
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
        _set_forward(inner, _own_forward(inner))  # in place of one that decorators made of it
    if compiled is None or not keep_torch_compile:
        return inner  # type: ignore[no-any-return]
    if is_compiled_module(compiled):
        compiled._orig_mod = inner
    else:
        compiled.__dict__["_orig_mod"] = inner
    return compiled


def load_plain(module: nn.Module, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """`load_state_dict` of the module inside a wrapper; names may be the wrapper's, that is, begin with `module.`."""
    state = copy.copy(state_dict)  # with the versions of modules that it has as an attribute
    if not hasattr(module, "module") and all(name.startswith("module.") for name in state):
        consume_prefix_in_state_dict_if_present(cast(dict[str, Any], state), "module.")
    return module.load_state_dict(state, *args, **kwargs)


def bare_copy(model: nn.Module) -> nn.Module:
    """A module with the same parameters and submodules and its class' own forward, not compiled; e.g. to pickle it."""
    twin = copy.copy(model)  # without what `Module.compile` made of its calls
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
    """The forward that was set on this object, out of what decorators made of it, each with its `__wrapped__`.

    None where that is the class'.
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
    """From now on `module.forward(…)` is `around(forward, …)`.

    Its signature stays, which transformers reads, and a copy of the module computes with the copy's weights.

    Returns:
        What takes it back.
    """
    own = module.__dict__.get("forward")  # one that the script, or a library, has set on this object

    def wrapped(forward: Forward) -> Forward:
        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            return around(forward, *args, **kwargs)

        return call

    placed: Forward
    if own is None:
        placed = MethodType(wrapped(type(module).forward), module)  # copying a module binds its methods anew
    elif isinstance(own, MethodType) and own.__self__ is module:
        placed = MethodType(wrapped(own.__func__), module)
    else:
        placed = wrapped(own)
    module.forward = placed

    def undo() -> None:
        if module.__dict__.get("forward") is not placed:
            return  # what was put around it since then
        if own is None:
            del module.forward
        else:
            module.forward = own

    return undo


def find_leaves(loss: Tensor) -> list[Tensor]:
    """The tensors at the ends of a loss's graph, which its gradient would reach; the graph may have been used.

    It walks the complete graph, which takes milliseconds for a large model.
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
    """Whether it is what `torch.compile(module)` returns."""
    return isinstance(module, torch._dynamo.OptimizedModule)


def has_compiled_regions(module: nn.Module) -> bool:
    """Whether it, or a module inside it, is what `torch.compile` returns."""
    return any(map(is_compiled_module, module.modules()))


def compile_in_place(module: nn.Module, plugin: TorchDynamoPlugin) -> None:
    """Compile the module with `Module.compile`.

    With `use_regional_compilation`, compile each block of its `ModuleList`s instead; without such blocks, the complete
    module. The module stays the same object, so that it can be wrapped, saved and unwrapped as before.
    """
    blocks = [block for part in module.modules() if _repeats(part) for block in part.children()]
    for part in blocks if plugin.use_regional_compilation and blocks else [module]:
        if not is_compiled_module(part):
            part.compile(**plugin.to_kwargs())


def without_wrappers(module: nn.Module) -> nn.Module:
    """Return the module, with each `torch.compile(…)` of it or of a part replaced by the part, compiled in place.

    A wrapper of `torch.compile` puts `_orig_mod.` into the names of a checkpoint. Stage 3 replaces `_parameters` of
    every module: a wrapper passes that on to the module inside, which then loses its own parameters.
    """
    for part in list(module.modules()):
        for name, child in part.named_children():
            if is_compiled_module(child):
                setattr(part, name, _compiled_inside(child))
    return _compiled_inside(module) if is_compiled_module(module) else module


def _compiled_inside(wrapper: Any) -> nn.Module:
    """Return the module inside, whose calls are compiled as the wrapper's are."""
    inner: Any = wrapper._orig_mod

    # torch's compiler skips a call of one of its own modules, but not a function of ours that makes it.
    def call(*args: Any, **kwargs: Any) -> Any:
        return inner._call_impl(*args, **kwargs)

    call.__code__ = call.__code__.replace()  # a code of its own: for one the compiler keeps eight results at most
    inner._compiled_call_impl = wrapper.dynamo_ctx(call)
    return cast(nn.Module, inner)


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """A shallow copy of `module` that shares its parameters, and whose parts are compiled.

    A `ModuleList` of modules of one class is compiled item by item; a module without such a list is compiled as one.

    Args:
        module: is not changed; the result keeps it as `_orig_mod`.
        **compile_kwargs: for `torch.compile`.
    """
    compiled = _compile_parts(module, compile_kwargs, {})
    if "_orig_mod" not in compiled.__dict__ and not is_compiled_module(compiled):
        compiled.__dict__["_orig_mod"] = module  # not a submodule: its parameters would count twice
    return compiled


def _compile_parts(module: nn.Module, compile_kwargs: dict[str, Any], known: dict[nn.Module, nn.Module]) -> nn.Module:
    """See `compile_regions`; `known` are the parts so far, since a module may have several names."""
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
