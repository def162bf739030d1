"""What an engine leaves on its module, in the parameters and in DeepSpeed's global lists, and how that is undone."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Final

from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import nn

from zero_plugin.strategies.deepspeed.partitioned_models import coordinator_of
from zero_plugin.strategies.optimizer_only import weakly

# Attributes of parameters that keep gradients, master weights or the engine's optimizer.
_ON_PARAMETERS: Final = ("_z3_optimizer", "_zero_optimizer", "_hp_mapping", "_hp_grad", "grad_accum")
# Attributes of modules at stage 3. A new engine keeps `pre_bwd_fn` and `post_bwd_fn` if they exist: its backwards would
# gather and release weights by the bookkeeping of the old engine. The others count what a failed forward left open.
_ON_MODULES: Final = (
    "pre_bwd_fn",
    "post_bwd_fn",
    "applied_pre_backward_ref_cnt",
    "ds_grads_remaining",
    "ds_recompute_parameters",
    "ds_inflight_param_registry",
    "_original_parameters",
)


def destroy(engine: Any) -> None:
    """Destroy an engine, and leave its module as if no engine had run it, also after a failed forward or backward.

    Weights stay partitioned at stage 3; those that DeepSpeed keeps gathered between two steps stay gathered.
    """
    module = engine.module
    coordinator = coordinator_of(engine) if engine.zero_optimization_partition_weights() else None
    engine.destroy()
    engine.module_forward_pre_hook.remove()
    engine.module_forward_post_hook.remove()
    if coordinator is not None:
        _release_weights(coordinator, [p for p in module.parameters() if hasattr(p, "ds_id")])
        for part in module.modules():
            _remove(part, _ON_MODULES)
            # DeepSpeed's own kind of dict gathers what a running, or failed, forward reads by its key.
            part._parameters = dict(part._parameters.items())
    for p in module.parameters():
        _remove(p, _ON_PARAMETERS)
    forget_module(module)


def _release_weights(coordinator: Any, parameters: Iterable[Any]) -> None:
    """Release what a forward or a backward has gathered, but not what persists."""
    parameters = list(parameters)
    for p in parameters:
        # DeepSpeed releases no weight that it believes a module to use: one whose backward has failed or never came.
        p.ds_active_sub_modules.clear()
    coordinator._clean_inflight_param_registry()
    for p in parameters:
        if p.ds_status is ZeroParamStatus.AVAILABLE and not p.ds_persist:
            p.partition()


def _remove(owner: Any, names: Iterable[str]) -> None:
    for name in names:
        owner.__dict__.pop(name, None)


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
        hooks[handle.id] = weakly(hooks[handle.id])
    if kept:
        engine.optimizer._zero_plugin_hooks = kept


def forget_module(module: nn.Module) -> None:
    """Release `module`, its partitions and its optimizer from DeepSpeed's global lists of stage 3."""
    # A failed forward leaves the submodules that it was in.
    parts = {id(part._modules) for part in module.modules()}
    FWD_MODULE_STACK[:] = [other for other in FWD_MODULE_STACK if id(other._modules) not in parts]  # or a proxy
    clear_caches()


def weaken_module_stack() -> None:
    """Make DeepSpeed's global stack of running modules, which keeps partitioned models alive, hold weak references."""
    FWD_MODULE_STACK[:] = [
        m if isinstance(m, weakref.ProxyTypes) else weakref.proxy(m, _forget) for m in FWD_MODULE_STACK
    ]


def clear_caches() -> None:
    """Clear a global cache in which DeepSpeed keeps modules of all engines; engines that still train fill it again."""
    cached = vars(PartitionedParameterCoordinator).get("_PartitionedParameterCoordinator__params_to_release")
    for cell in getattr(cached, "__closure__", None) or ():
        if hasattr(cell.cell_contents, "cache_clear"):
            cell.cell_contents.cache_clear()


def _forget(dead: Any) -> None:
    FWD_MODULE_STACK[:] = [other for other in FWD_MODULE_STACK if other is not dead]
