"""Undo what an engine leaves on its module, on the parameters and in DeepSpeed's global lists."""

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
# Attributes of modules at stage 3. A new engine would keep existing `pre_bwd_fn` and `post_bwd_fn`: its backwards would
# gather and release weights by the old engine's bookkeeping. The others count what a failed forward left open.
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
    """Destroy an engine, and clean its module of all traces, also after a failed forward or backward.

    Weights stay partitioned at stage 3. Weights that DeepSpeed keeps gathered between two steps stay gathered.
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
            # DeepSpeed's kind of dict gathers parameters that a running, or failed, forward reads by key.
            part._parameters = dict(part._parameters.items())
    for p in module.parameters():
        _remove(p, _ON_PARAMETERS)
    forget_module(module)


def _release_weights(coordinator: Any, parameters: Iterable[Any]) -> None:
    """Release the weights that a forward or a backward has gathered, except persistent ones."""
    parameters = list(parameters)
    for p in parameters:
        # DeepSpeed does not release a weight in use by a module. A failed or missing backward leaves it "in use".
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

    * At stages 1 and 2 each parameter has a view of itself as an attribute. The view's graph refers to the parameter.
    * The gradient hook of each parameter refers to the optimizer. Now the optimizer owns the hook, and the parameter
      has a weak reference.
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
    # A failed forward leaves its running submodules in the stack.
    parts = {id(part._modules) for part in module.modules()}
    FWD_MODULE_STACK[:] = [other for other in FWD_MODULE_STACK if id(other._modules) not in parts]  # or a proxy
    clear_caches()


def weaken_module_stack() -> None:
    """Make DeepSpeed's global stack of running modules hold weak references: it keeps partitioned models alive."""
    FWD_MODULE_STACK[:] = [
        m if isinstance(m, weakref.ProxyTypes) else weakref.proxy(m, _forget) for m in FWD_MODULE_STACK
    ]


def clear_caches() -> None:
    """Clear a global cache of DeepSpeed with modules of all engines; engines that still train fill it again."""
    cached = vars(PartitionedParameterCoordinator).get("_PartitionedParameterCoordinator__params_to_release")
    for cell in getattr(cached, "__closure__", None) or ():
        if hasattr(cell.cell_contents, "cache_clear"):
            cell.cell_contents.cache_clear()


def _forget(dead: Any) -> None:
    FWD_MODULE_STACK[:] = [other for other in FWD_MODULE_STACK if other is not dead]
