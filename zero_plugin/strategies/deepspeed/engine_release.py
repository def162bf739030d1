"""Releases what DeepSpeed keeps of engines that were closed or garbage-collected, so that their memory is freed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import Tensor, nn


def break_reference_cycles(engine: Any) -> None:
    """Break reference cycles of an engine's parameters through torch's C++ objects, which Python's GC cannot see.

    * At stages 1 and 2 each parameter has a view of itself as an attribute, whose graph refers to the parameter.
    * The gradient hook of each parameter refers to the optimizer: the optimizer now owns it, and the parameter has a
      weak reference.
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
    """Release `module`, its partitions and its optimizer from DeepSpeed's global lists of stage 3."""
    FWD_MODULE_STACK[:] = [other for other in FWD_MODULE_STACK if other._modules is not module._modules]  # or a proxy
    clear_caches()


def weaken_module_stack() -> None:
    """Make DeepSpeed's global stack of running modules, which keeps partitioned models alive, hold weak references."""
    FWD_MODULE_STACK[:] = [m if isinstance(m, weakref.ProxyType) else weakref.proxy(m, _drop) for m in FWD_MODULE_STACK]


def clear_caches() -> None:
    """Clear a global cache in which DeepSpeed keeps modules of all engines; engines that still train fill it again."""
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
