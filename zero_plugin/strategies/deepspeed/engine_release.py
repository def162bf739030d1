"""Lets go of what DeepSpeed keeps of engines that have ended, or were dropped: else the next one's memory adds up."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import Tensor, nn


def break_reference_cycles(engine: Any) -> None:
    """Have an engine's parameters keep neither themselves nor the engine, by what torch's C++ hides from Python.

    * Stages 1 and 2 keep a view of each parameter with it, whose graph leads back to the parameter.
    * The hook of each parameter's gradient is a function that holds the optimizer: that keeps it from now on, and the
      parameter finds it there.
    """
    for p in engine.module.parameters():
        if (fragment := getattr(p, "_hp_mapping", None)) is not None:
            fragment.lp_fragment = fragment.lp_fragment.detach()
    kept = []
    for handle in getattr(engine.optimizer, "_grad_acc_hooks", ()):
        hooks = handle.hooks_dict_ref()
        kept.append(hooks[handle.id])
        hooks[handle.id] = _weakly(hooks[handle.id])
    if kept:
        engine.optimizer._zero_plugin_hooks = kept


def forget_module(module: nn.Module) -> None:
    """Drop what holds `module`, its partitions and its optimizer at stage 3 as long as the process lives."""
    FWD_MODULE_STACK[:] = [other for other in FWD_MODULE_STACK if other._modules is not module._modules]  # or a proxy
    clear_caches()


def weaken_module_stack() -> None:
    """Let the stack of modules whose forward runs, which begins with each that was ever partitioned, not keep them."""
    FWD_MODULE_STACK[:] = [m if isinstance(m, weakref.ProxyType) else weakref.proxy(m, _drop) for m in FWD_MODULE_STACK]


def clear_caches() -> None:
    """Drop what engines found out about their modules: a decorator caches it, for all of them in one cache.

    Those that still train find it out anew.
    """
    cached = vars(PartitionedParameterCoordinator).get("_PartitionedParameterCoordinator__params_to_release")
    for cell in getattr(cached, "__closure__", None) or ():
        if hasattr(cell.cell_contents, "cache_clear"):
            cell.cell_contents.cache_clear()


def _weakly(hook: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    reference = weakref.ref(hook)

    def call(p: Tensor) -> None:
        if (hook := reference()) is not None:
            hook(p)

    return call


def _drop(dead: Any) -> None:
    FWD_MODULE_STACK[:] = [other for other in FWD_MODULE_STACK if other is not dead]
