"""The attributes of DeepSpeed, torch, transformers and PEFT that this package replaces, and how it restores them.

`PATCHES` has one row for each attribute. `Patches` replaces only attributes that have a row.
`docs/deepspeed-internals.md` shows the rows: `python tests/strategies/test_patches.py` writes them there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, Literal

from zero_plugin.config import installed

_ENGINE: Final = "deepspeed.runtime.engine.DeepSpeedEngine"
_STAGE_2: Final = "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"
_STAGE_3: Final = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
_COORDINATOR: Final = "deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator"
_PARTITIONED: Final = "deepspeed.runtime.zero.partition_parameters"
_MODULE: Final = "torch.nn.modules.module.Module"
_TENSOR: Final = "torch.Tensor"
_PRETRAINED: Final = "transformers.modeling_utils.PreTrainedModel"
_LAYER: Final = "peft.tuners.tuners_utils.BaseTunerLayer"
_TORCH, _TRANSFORMERS, _PEFT = "2.13.0", "5.23.0", "0.21.2"


@dataclass(frozen=True, kw_only=True, slots=True)
class Patch:
    """One replaced attribute.

    Attributes:
        owner: the dotted name of the class or module of the attribute. A row of a class covers its objects too.
        name: the attribute.
        what_for: the replacement, and the reason for it.
        without_it: what a user sees if the attribute disappears or is not replaced.
        undone: when the package restores the attribute. `with the engine`: not before the engine is deleted, so a
            script that still has the engine gets this package's errors. `never`: it stays for the life of the process
            or of the user's model.
        public: the public alternative, and why it is not enough.
        releases: the release whose code was read for this row.
        defined_in: the class or the module that defines the attribute, if that is not `owner`.
    """

    owner: str
    name: str
    what_for: str
    without_it: str
    undone: Literal["at close", "with the engine", "after the call", "never"]
    public: str = "none"
    releases: str = "0.19.8"
    defined_in: str = ""


PATCHES: Final = (
    Patch(
        owner=_ENGINE,
        name="_backward_prologue",
        what_for="The session calls it once per backward. The output hook runs a check of the session instead.",
        without_it="`prepare` fails with AttributeError",
        undone="with the engine",
        public="`engine.backward`: takes one scalar loss of one model",
    ),
    Patch(
        owner=_ENGINE,
        name="_backward_prologue_per_tensor",
        what_for="The engine's method divides each output's gradient by the accumulation steps.",
        without_it="**Silent**: gradients are divided twice; at stage 3 a second backward fails with torch's error",
        undone="with the engine",
        public="`scale_wrt_gas=False`: only an argument of `engine.backward`",
    ),
    Patch(
        owner=_ENGINE,
        name="backward",
        what_for="Raises: the engine's method would divide the loss.",
        without_it="**Silent**: `model.backward(loss)` divides the loss and ignores the window",
        undone="with the engine",
    ),
    Patch(
        owner=_ENGINE,
        name="step",
        what_for="Raises: the engine's method would ignore the accumulation window. The session keeps and calls it.",
        without_it="**Silent**: `model.step()` steps in the middle of a window",
        undone="with the engine",
    ),
    Patch(
        owner=_ENGINE,
        name="no_sync",
        what_for="A context that does nothing, like `accelerator.no_sync` under ZeRO.",
        without_it="`model.no_sync()` fails with AssertionError at stages 2 and 3",
        undone="with the engine",
    ),
    Patch(
        owner=_ENGINE,
        name="__deepcopy__",
        what_for="Raises: no second engine trains.",
        without_it="`deepcopy(model)` copies the engine, or fails with another error",
        undone="with the engine",
        defined_in="copy",
    ),
    Patch(
        owner=_ENGINE,
        name="state_dict",
        what_for="Is the user's module's own method, so names lack `module.`.",
        without_it="names in `model.state_dict()` begin with `module.`",
        undone="with the engine",
        public="`engine.module.state_dict`: scripts call the prepared model's method",
        defined_in=_MODULE,
    ),
    Patch(
        owner=_ENGINE,
        name="load_state_dict",
        what_for="Loads into the user's module, with or without `module.` in the names.",
        without_it="`model.load_state_dict()` fails for names without `module.`",
        undone="with the engine",
        public="`engine.module.load_state_dict`: scripts call the prepared model's method",
        defined_in=_MODULE,
    ),
    Patch(
        owner=_ENGINE,
        name="train",
        what_for="Returns the model, like `Module.train`.",
        without_it="`model.train()` returns None",
        undone="with the engine",
    ),
    Patch(
        owner=_ENGINE,
        name="eval",
        what_for="Returns the model, like `Module.eval`.",
        without_it="`model.eval()` returns None",
        undone="with the engine",
    ),
    Patch(
        owner=_ENGINE,
        name="zero_grad",
        what_for="Calls `zero_grad` of the prepared optimizer. Inside the engine's step, the engine's method runs.",
        without_it="**Silent**: `model.zero_grad()` leaves the gradients of the window",
        undone="with the engine",
    ),
    Patch(
        owner=_ENGINE,
        name="enable_backward_allreduce",
        what_for="False at stages 0 and 1: `finalize` reduces gradients, not each backward.",
        without_it="**Silent**: the step reduces a second time, after the clip and the rescaling",
        undone="at close",
    ),
    Patch(
        owner=_ENGINE,
        name="clip_fp32_gradients",
        what_for="Clips by the known norm at stage 0 in fp32. DeepSpeed's method measures the norm again.",
        without_it="**Silent**: the norm is measured twice; the results are the same",
        undone="at close",
    ),
    Patch(
        owner=_ENGINE,
        name="_broadcast_model",
        what_for="Makes scalars and non-contiguous parameters sendable while an engine is built.",
        without_it="`prepare` fails for these models (CLIP, channels_last) with DeepSpeed's error",
        undone="after the call",
    ),
    Patch(
        owner="deepspeed.runtime.base_optimizer.ZeROOptimizer",
        name="reenter_backward_if_needed",
        what_for="Refuses a foreign backward. Each parameter's hook calls this method first.",
        without_it="`prepare` fails. If hooks no longer call it, **silent**: `loss.backward()` trains wrongly",
        undone="with the engine",
    ),
    *(
        Patch(
            owner=owner,
            name="_update_scale",
            what_for="Does nothing: the session changes the loss scale after the step, not during the step.",
            without_it="**Silent**: a step after which the scale doubles halves the gradients",
            undone="at close",
        )
        for owner in (
            _STAGE_2,
            _STAGE_3,
            "deepspeed.runtime.fp16.fused_optimizer.FP16_Optimizer",
            "deepspeed.runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer",
        )
    ),
    *(
        Patch(
            owner=owner,
            name="finalize_gradient_accumulation_boundary",
            what_for="Does nothing in the step: `finalize` calls the class's method before the clip.",
            without_it="**Silent** if the step calls another method: gradients are finalized twice",
            undone="at close",
        )
        for owner in (_STAGE_2, _STAGE_3)
    ),
    Patch(
        owner=_STAGE_2,
        name="reduce_ipg_grads",
        what_for="Preceded by `before_reduce`: guards compare the order of reductions between the processes.",
        without_it="**Silent**: processes in different branches mix up gradients",
        undone="at close",
    ),
    Patch(
        owner=_STAGE_2,
        name="scaled_global_norm",
        what_for="Cached until gradients change, so the step does not reduce the norm again.",
        without_it="`prepare` fails with AttributeError",
        undone="at close",
        public="`get_global_grad_norm`: known only after the step",
    ),
    Patch(
        owner=_STAGE_3,
        name="_get_norm_groups",
        what_for="Norms by group, cached until gradients change.",
        without_it="`prepare` fails with AttributeError",
        undone="at close",
        public="`get_global_grad_norm`: known only after the step",
    ),
    Patch(
        owner=_STAGE_3,
        name="_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads",
        what_for="Preceded by `before_reduce`, as at stage 2.",
        without_it="`prepare` fails; after a renaming, **silent**: processes in different branches mix up gradients",
        undone="at close",
    ),
    Patch(
        owner=_STAGE_3,
        name="fp16_groups",
        what_for="Passes one sub-group at a time with NVMe. DeepSpeed would keep all fp32 gradients on the device.",
        without_it="`prepare` fails with AttributeError",
        undone="after the call",
    ),
    Patch(
        owner=_STAGE_3,
        name="set_full_hp_param",
        what_for="Preceded by a note of `MasterWeights`. `safe_set_full_fp32_param` calls it.",
        without_it="**Silent**: a later warning of lost weights is wrong; a background save may be inconsistent",
        undone="at close",
    ),
    Patch(
        owner=_TENSOR,
        name="set_full_hp_param",
        what_for="The same for parameters at stages 1 and 2.",
        without_it="**Silent**: a later warning of lost weights is wrong",
        undone="at close",
        defined_in="deepspeed.utils.mixed_precision_linkage",
    ),
    Patch(
        owner=_STAGE_3,
        name="set_local_hp_param",
        what_for="Preceded by a note of `MasterWeights`. `safe_set_local_fp32_param` calls it.",
        without_it="**Silent**: a later warning of lost weights is wrong; a background save may be inconsistent",
        undone="at close",
    ),
    Patch(
        owner=_COORDINATOR,
        name="fetch_sub_module",
        what_for="Counts empty parameters as gathered. Replaces errors about foreign parameters by clearer ones.",
        without_it="DeepSpeed's assertion in the first forward of models with empty parameters",
        undone="at close",
    ),
    Patch(
        owner=_COORDINATOR,
        name="release_sub_module",
        what_for="Replaces errors about foreign parameters by clearer ones.",
        without_it="`no attribute 'ds_id'`, or `tracing error`, after a change of a prepared model",
        undone="at close",
    ),
    Patch(
        owner=_COORDINATOR,
        name="reset_step",
        what_for="Replaces errors about foreign parameters by clearer ones.",
        without_it="`no attribute 'ds_id'`, or `tracing error`, after a change of a prepared model",
        undone="at close",
    ),
    Patch(
        owner=_COORDINATOR,
        name="_PartitionedParameterCoordinator__all_gather_params",
        what_for="Preceded by `before_gather`: guards compare the order of gathers between the processes.",
        without_it="`prepare` fails with AttributeError. After a renaming, processes in different branches hang",
        undone="at close",
    ),
    Patch(
        owner=_TENSOR,
        name="all_gather",
        what_for="Preceded by a check of `PartitionedWrites`; `states.py` calls it after a load.",
        without_it="AttributeError in `load_state` and `prepare`",
        undone="at close",
        defined_in=_PARTITIONED,
    ),
    Patch(
        owner=_TENSOR,
        name="all_gather_coalesced",
        what_for="Preceded by a check: writes into an empty parameter are lost.",
        without_it="`prepare` fails. If no longer called, **silent**: no check finds this write",
        undone="at close",
        defined_in=_PARTITIONED,
    ),
    Patch(
        owner=_TENSOR,
        name="partition",
        what_for="Preceded by a check, which compares written values with the partition. `lifetime.py` calls it.",
        without_it="`prepare` fails. If no longer called, **silent**: no check finds a write in a forward",
        undone="at close",
        defined_in=_PARTITIONED,
    ),
    Patch(
        owner=_TENSOR,
        name="set_",
        what_for="Ignores the parameter itself as argument: `torch.nn.utils.parametrize` passes it, which is no write.",
        without_it="a parametrization that a forward registers is refused as a write",
        undone="at close",
        releases=_TORCH,
        defined_in="torch._C.TensorBase",
    ),
    Patch(
        owner=_TENSOR,
        name="__deepcopy__",
        what_for="Raises for a partitioned parameter: no process has all of its values.",
        without_it="**Silent**: a copy of a partitioned model has empty weights",
        undone="never",
        releases=_TORCH,
        defined_in="torch._tensor.Tensor",
    ),
    Patch(
        owner=f"{_PARTITIONED}.Init",
        name="_zero_init_param",
        what_for="Sends parameters of any shape, and refuses `deepcopy`. A subclass casts after initialization.",
        without_it="**Silent**: models built in `init_model` have other initial values than unpartitioned ones",
        undone="never",
    ),
    Patch(
        owner=f"{_PARTITIONED}.Init",
        name="_post_init_method",
        what_for="Adds a hook to the partitioned module that refuses forwards until `prepare`.",
        without_it="`Accelerator()` fails with AttributeError. If no longer called, forwards fail with torch's error",
        undone="never",
    ),
    Patch(
        owner=f"{_PARTITIONED}.GatheredParameters",
        name="__exit__",
        what_for="Makes parameters sendable during the call, and notes writes into weights.",
        without_it="`from_pretrained` of these models (CLIP) fails with DeepSpeed's error",
        undone="never",
    ),
    Patch(
        owner="deepspeed.runtime.swap_tensor.partitioned_param_swapper.AsyncPartitionedParameterSwapper",
        name="swap_in",
        what_for="Requests each weight once. DeepSpeed may request a weight twice, and then fails an assertion.",
        without_it="DeepSpeed's assertion near the end of a forward",
        undone="at close",
    ),
    Patch(
        owner="deepspeed.runtime.swap_tensor.optimizer_utils.OptimizerSwapper",
        name="_adjust_for_misaligned_lengths",
        what_for="Aligns offsets too, not only lengths.",
        without_it="**Silent**: steps use old gradients if an offset is not aligned",
        undone="at close",
    ),
    Patch(
        owner="deepspeed.ops.op_builder.builder.OpBuilder",
        name="jit_load",
        what_for="Preceded by a check for missing tools and for locks of killed builds.",
        without_it="AttributeError in `prepare` and in scripts that `launch` starts",
        undone="never",
    ),
    Patch(
        owner="deepspeed.runtime.bf16_optimizer",
        name="see_memory_usage",
        what_for="Does nothing while an engine is built. DeepSpeed's function prints at any log level.",
        without_it="`prepare` fails with AttributeError",
        undone="after the call",
    ),
    Patch(
        owner="torch.optim.optimizer.Optimizer",
        name="step",
        what_for="Has the marks that torch's schedulers look for. Used if DeepSpeed's kernel replaces the optimizer.",
        without_it="torch warns of a scheduler that runs ahead of its optimizer",
        undone="with the engine",
        releases=_TORCH,
    ),
    Patch(
        owner="transformers.integrations.deepspeed",
        name="_hf_deepspeed_config_weak_ref",
        what_for="Is the configuration by which `from_pretrained` partitions. The earlier value is restored.",
        without_it="AttributeError in `from_pretrained` at stage 3",
        undone="after the call",
        public="`set_hf_deepspeed_config` and `unset_…`: neither returns the earlier value",
        releases=_TRANSFORMERS,
    ),
    Patch(
        owner="transformers.modeling_utils",
        name="_is_ds_init_called",
        what_for="Tells `from_config` and `from_pretrained` in `init_model` that modules are partitioned already.",
        without_it="AttributeError in `init_model`; after a renaming, DeepSpeed's RuntimeError",
        undone="after the call",
        releases=_TRANSFORMERS,
    ),
    Patch(
        owner=_PRETRAINED,
        name="_from_config",
        what_for="Gives a new model the same initial values at stage 3 as at other stages.",
        without_it="AttributeError in `Accelerator()`; after a renaming, **silent**: other values than below stage 3",
        undone="after the call",
        releases=_TRANSFORMERS,
    ),
    Patch(
        owner=_PRETRAINED,
        name="_initialize_weights",
        what_for="Gathers a module while transformers initializes it again, after it is partitioned.",
        without_it="AttributeError in `init_model`; after a renaming, **silent**: weights of another distribution",
        undone="after the call",
        releases=_TRANSFORMERS,
    ),
    Patch(
        owner="transformers.generation.utils.GenerationMixin",
        name="generate",
        what_for="Passes `synced_gpus`: each process has a partition of every weight.",
        without_it="`generate` can hang if processes end at different lengths",
        undone="never",
        public="the argument itself: scripts for one device lack it",
        releases=_TRANSFORMERS,
    ),
    Patch(
        owner=_MODULE,
        name="save_pretrained",
        what_for="Writes the given state dict; raises without one, if weights are partitioned.",
        without_it="**Silent**: empty weights in the file",
        undone="never",
        releases=_TRANSFORMERS,
        defined_in=_PRETRAINED,
    ),
    Patch(
        owner=_MODULE,
        name="merge",
        what_for="Raises if the weights of a layer with adapters are partitioned.",
        without_it="**Silent**: nothing is added to the weights",
        undone="never",
        releases=_PEFT,
        defined_in=_LAYER,
    ),
    Patch(
        owner=_MODULE,
        name="unmerge",
        what_for="Raises if the weights of a layer with adapters are partitioned.",
        without_it="**Silent**: nothing is subtracted from the weights",
        undone="never",
        releases=_PEFT,
        defined_in=_LAYER,
    ),
    Patch(
        owner=_MODULE,
        name="update_and_allocate",
        what_for="Raises: AdaLoRA would read `p.grad` after the step.",
        without_it="AdaLoRA fails with PEFT's error",
        undone="at close",
        releases=_PEFT,
        defined_in="peft.tuners.adalora.model.AdaLoraModel",
    ),
)
_ROWS: Final = {(patch.owner, patch.name): patch for patch in PATCHES}
_UNDONE: Final = ("at close", "after the call")
_ABSENT: Final = object()


class Patches:
    """The attributes that one session, or one call, has replaced. The session's `close` restores them."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, new: object) -> None:
        """Set the attribute of an object, a class or a module to `new`.

        Raises:
            KeyError: no row of `PATCHES` names the attribute.
        """
        if _row_of(owner, name).undone in _UNDONE:
            self._before.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, new)

    def precede(self, owner: Any, name: str, note: Callable[..., object]) -> None:
        """Call `note` before each call of the method, with the same arguments."""
        method = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            note(*args, **kwargs)
            return method(*args, **kwargs)

        self.replace(owner, name, call)

    def undo(self) -> None:
        """Restore the attributes, the last one first. Rows with `with the engine` or `never` stay replaced."""
        while self._before:
            owner, name, before = self._before.pop()
            if before is not _ABSENT:
                setattr(owner, name, before)
            elif name in vars(owner):
                delattr(owner, name)


def replaced(owner: Any, name: str, new: object) -> AbstractContextManager[None]:
    """Replace an attribute that has a row inside this context."""
    _row_of(owner, name)
    return installed.replaced(owner, name, new)


def _row_of(owner: Any, name: str) -> Patch:
    kinds = (owner if isinstance(owner, type) else type(owner)).__mro__
    is_module = isinstance(owner, ModuleType)
    places = [owner.__name__] if is_module else [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds]
    for place in places:
        if (row := _ROWS.get((place, name))) is not None:
            return row
    raise KeyError(f"no row of PATCHES names {name} of {places[0]}: add one to patches.py before you replace it")
