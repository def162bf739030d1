"""`EngineSession`: a training session on a DeepSpeed engine."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import zero
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_plugin.distributed.collective_check import own_progress
from zero_plugin.distributed.collectives import announce
from zero_plugin.distributed.messages import once
from zero_plugin.distributed.processes import process_group
from zero_plugin.errors import LoopError
from zero_plugin.strategies.base import Session, release_failed_backward
from zero_plugin.strategies.deepspeed import explanations, lifetime, partitioned_models, states
from zero_plugin.strategies.deepspeed.buffers import SharedBuffers
from zero_plugin.strategies.deepspeed.gradients import engine_gradients, is_muon
from zero_plugin.strategies.deepspeed.master_weights import MasterWeights
from zero_plugin.strategies.deepspeed.nvme import fix_swapping, remove_swap_folders
from zero_plugin.strategies.deepspeed.patches import Patches
from zero_plugin.strategies.events import Events
from zero_plugin.strategies.optimizer_only import StepInParts, weakly
from zero_plugin.strategies.optimizer_states import GivenStates, OptimizedPiece, fill_states
from zero_plugin.strategies.precision import LossScale, Measured, compute_in
from zero_plugin.tensors.modules import Fragment, persistent_tensors
from zero_plugin.tensors.wrappers import find_leaves, load_plain

# Elements to gather at a time: enough to use the bandwidth, few compared with a large layer.
_GATHER_ELEMENTS = 2**26


class EngineSession(Session):
    """A session of ZeRO 0-3. Stages 0 and 1 reduce gradients in the step, stages 2 and 3 in every backward.

    Args:
        engine: a DeepSpeed engine with `managed_gradient_accumulation: false`; at stage 3 it may have no optimizer.
        scale: the loss scale of fp16; the session sets the engine's own scale from it.
        swap_folders: the NVMe folders of this engine, which `close` removes.
        given: the script's optimizer; the engine may run another one.

    Attributes:
        engine: the engine; None after `close`.
        stage: the ZeRO stage.
        gradients: the accumulated gradients in the engine.
        masters: the fp32 master weights.
        trained: the trained parameters.
        patches: the attributes of DeepSpeed that are replaced until `close`.
        steps_by_grad: whether the step applies `p.grad`.
        at_end: functions that `close` calls after it has destroyed the engine.
    """

    unpartitioned_gradients = False

    def __init__(
        self,
        engine: Any,
        *,
        scale: LossScale | None = None,
        swap_folders: tuple[Path, ...],
        given: Optimizer | None = None,
    ) -> None:
        self.engine = engine
        self.model = engine
        self.module: nn.Module = engine.module
        self.optimizer: Optimizer | None = engine.basic_optimizer
        self.given = given
        self.events = Events()
        self.patches = Patches()
        self.gradients = engine_gradients(engine, self.events, self.patches)
        self.trained = [p for p in engine.module.parameters() if p.requires_grad and self.optimizer is not None]
        self.scales_loss = engine.fp16_enabled() or engine.torch_autocast_enabled()
        scales = engine.fp16_enabled() and not engine.torch_autocast_enabled() and self.optimizer is not None
        self._scale = scale if scales else None
        self._clips_steps = _clips_steps(engine.optimizer)
        self._swap_folders = swap_folders
        self.leaves_files = bool(swap_folders)
        self.at_end: list[Callable[[], None]] = []
        self._progress = own_progress()  # used instead of `pass_together`, to save its call in each step
        self._passed = False  # whether the running backward has reached the model's outputs
        self._loss: Callable[[], Tensor | None] = lambda: None  # returns the loss of the running backward
        self._describe_gradients()
        self._describe_states()
        self.masters = MasterWeights(engine, self.trained, self.events, self._await_copy)
        self.undo = self.masters.watch(self.patches)
        self._parts: StepInParts | None = None  # if DeepSpeed steps an unknown optimizer in parts
        if self.stage > 0 and self.optimizer is not None and type(self.optimizer) not in ZERO_SUPPORTED_OPTIMIZERS:
            self._parts = StepInParts(self.optimizer)
            self.undo.append(self._parts.remove)
        self._watch_weights()
        self._enter, self._leave, self._step = engine._backward_prologue, engine._backward_epilogue, engine.step
        self._replace_calls()
        self._pass_scale()
        self._buffers = SharedBuffers(self.module)
        self._buffers.send()  # DeepSpeed itself broadcasts only the parameters
        lifetime.break_reference_cycles(engine)

    def _describe_gradients(self) -> None:
        """Set where gradients accumulate, and when they are reduced."""
        engine, wrapper = self.engine, self.engine.optimizer
        self.stage = engine.zero_optimization_stage()
        # Stage 0 applies `p.grad`. So does stage 1 if gradients accumulate there. Otherwise gradients accumulate in
        # buffers of the engine.
        self.steps_by_grad = self.stage == 0 or not (
            self.stage > 1
            or getattr(wrapper, "overlap_comm", False)
            or getattr(wrapper, "use_grad_accum_attribute", True)
        )
        self._reduces_in_backward = engine.zero_optimization_partition_gradients()
        self.partitioned = self.trained
        if self.stage == 0 and not engine.has_moe_layers:
            self.copies = self.trained

    def _describe_states(self) -> None:
        """Set where the optimizer's states are, and whether they are unpartitioned."""
        engine, wrapper = self.engine, self.engine.optimizer
        self.states_stay = not (
            getattr(wrapper, "swap_optimizer", False) or getattr(wrapper, "params_in_nvme_and_cpu", False)
        )
        self.unpartitioned_states = self.optimizer is wrapper
        if isinstance(wrapper, ZeROOptimizer) and dist.get_world_size() > 1:
            self.states_are = f"partitioned over {dist.get_world_size()} processes"
        elif not self.states_stay:
            self.states_are = "on NVMe"
        elif self.optimizer is not None and engine.zero_optimization_partition_weights():
            self.states_are = "in sub-groups of stage 3, which are not in the parameter groups"

    def _watch_weights(self) -> None:
        """Count forwards that gather partitioned weights. Begin each one with weights that autograd can save."""
        self._fetched: list[Any] = []  # parameters that each forward and backward gathers, at stage 3
        self._partitioned: list[Any] = [p for p in self.module.parameters() if hasattr(p, "ds_id")]
        self._state_dicts: partitioned_models.PartitionedStates | None = None
        if not self.engine.zero_optimization_partition_weights():
            return
        partitioned_models.begin_gathering(self.module)
        self._state_dicts = partitioned_models.PartitionedStates(self.module)
        self.undo += [handle.remove for handle in self._state_dicts.handles]
        self._fetched = [p for p in self._partitioned if not p.ds_persist]
        self.undo.append(self.engine.register_forward_pre_hook(self._note_fetch).remove)
        # A hook on the module too, because a script may call it directly. Weak: copies of the module lack an engine.
        self.undo.append(self.module.register_forward_pre_hook(weakly(self._renew_inferred), prepend=True).remove)

    def _replace_calls(self) -> None:
        """Replace the engine's methods that would run a backward or a step outside of the session."""
        engine, module, patches = self.engine, self.module, self.patches
        # The session calls the engine's prologue and epilogue once per backward. DeepSpeed would call them in a hook
        # on every output, and divide the gradients by the accumulation steps.
        patches.replace(engine, "_backward_prologue", self._pass_outputs)
        patches.replace(engine, "_backward_prologue_per_tensor", self._pass_output)
        if self._scale is not None:
            # DeepSpeed changes the scale before it divides the gradients by the scale: a step after which the scale
            # doubles would halve the gradients. The session changes the scale after the step, at every stage.
            patches.replace(engine.optimizer, "_update_scale", lambda *_: None)
        patches.replace(engine, "backward", explanations.refuse_engine_backward)
        patches.replace(engine, "step", explanations.refuse_engine_step)
        patches.replace(engine, "no_sync", nullcontext)  # like the session's; the engine's own refuses stages 2 and 3
        refuse_copy = functools.partial(partitioned_models.refuse_engine_copy, type(module).__name__)
        patches.replace(engine, "__deepcopy__", refuse_copy)
        patches.replace(engine, "state_dict", module.state_dict)
        patches.replace(engine, "load_state_dict", functools.partial(load_plain, module))
        patches.replace(engine, "train", _returning(engine, engine.train))
        patches.replace(engine, "eval", _returning(engine, engine.eval))
        compute_in(engine, engine.get_data_types()[0])
        fix_swapping(engine, patches)
        partitioned_models.fetch_empty(engine, patches)
        if self._partitioned:
            partitioned_models.explain_foreign(engine, patches)

    def load_given_states(self, given: GivenStates) -> None:
        """Load the states that the optimizer had before it was partitioned. Collective.

        Raises:
            CheckpointError: the engine's states are not accessible by parameter name.
            LoopError: a flat partition cannot have these states.
        """
        states.refuse_unreachable(self.engine, "a state that the optimizer had before prepare()")
        with self.loading():
            fill_states(self.blocks(changing=True), given)

    def raise_clearer(self, error: BaseException) -> None:
        # If a backward only runs other backwards in its hook, its loss depends on no weight.
        loss = self._loss()
        is_nested = loss is not None and self._passed and not self._depends(loss)
        explanations.explain(error, self.engine, self._swap_folders, is_nested=is_nested)

    def emit_from_hooks(self) -> None:
        self.gradients.emit_from_hooks()
        if not self.events.gradient_outside:
            return
        wrapper, reference = self.engine.optimizer, weakref.ref(self)
        if isinstance(wrapper, ZeROOptimizer) and not isinstance(wrapper, BF16_Optimizer):
            # DeepSpeed's hook on each parameter calls this method first.
            emit = _emit_gradient_outside(reference, wrapper.reenter_backward_if_needed)
            self.patches.replace(wrapper, "reenter_backward_if_needed", emit)
            return
        trained: list[Any] = self.trained
        emit = _emit_gradient_outside(reference, lambda *_: None)
        self.undo += [p.register_post_accumulate_grad_hook(emit).remove for p in trained]

    def may_compute_gradients(self) -> bool:
        return self.is_in_backward or explanations.runs_forward(self.engine)

    def open_backward(self, loss: Tensor, *, ends_window: bool, is_first: bool) -> None:  # noqa: ARG002
        for check in self.events.before_backward:
            check(loss, is_first=is_first)
        self._passed, self._loss = False, weakref.ref(loss)  # weak, so the graph does not outlive a failed backward
        self.gradients.before_backward(is_first=is_first)
        self.is_in_backward = True
        self.engine.__dict__["_running_engine_backward"] = True  # bypasses nn.Module's slow __setattr__
        self._enter()

    def has_reached(self, loss: Tensor, *, is_first: bool) -> bool:  # noqa: ARG002
        return self._passed or self._depends(loss)

    def _depends(self, loss: Tensor) -> bool:
        """Return whether the graph of a loss depends on a trained parameter; a checkpoint may hide the dependency."""
        trained = {id(p) for p in self.trained}
        return any(id(leaf) in trained for leaf in find_leaves(loss))

    def close_backward(self, *, reached: bool) -> None:
        engine = self.engine
        if self.optimizer is None:
            engine.optimizer.release_backward_leftovers()  # at stage 3: the weights that a backward gathered
            return
        # Without gradients, the reduction fails at stages 1 and 2, and would count a micro-batch at stage 3.
        engine.__dict__["inside_no_sync_ctxt"] = not reached
        try:
            self._leave()
            for check in self.events.after_backward if reached else ():
                check()
        except BaseException:
            self.abandon_backward(reached=True)
            raise
        finally:
            engine.__dict__["inside_no_sync_ctxt"] = engine.__dict__["_running_engine_backward"] = False
            self.is_in_backward = False
        if reached:
            engine.__dict__["_unmanaged_backward_count"] += 1

    def abandon_backward(self, *, reached: bool) -> bool:
        self.is_in_backward = False
        self.engine.__dict__["_running_engine_backward"] = False
        if isinstance(self.engine.optimizer, ZeROOptimizer):
            self.engine.optimizer.exit_backward()
        return reached

    def scale_loss(self, loss: Tensor) -> Tensor:
        if not self.scales_loss:
            return loss
        if isinstance(self.engine.optimizer, ZeROOptimizer):
            scaled: Tensor = self.engine.optimizer.scale_if_loss(loss)
        elif (scaler := self.engine.torch_autocast_z0_gradscaler) is not None:
            scaled = scaler.scale(loss)
        elif self._scales_stage_0:
            scaled = self.engine.scale(loss)
        else:
            scaled = loss.float() * self.loss_scale
        return scaled

    @functools.cached_property
    def _scales_stage_0(self) -> bool:
        """Whether DeepSpeed scales the loss for fp16 optimizers of stage 0, whose step expects it; 0.19 does not."""
        loss = torch.ones((), requires_grad=True).clone()
        return self.engine.scale(loss) is not loss

    def set_loss_scale(self, scale: float, *, accumulated: bool, complete: bool) -> None:
        if accumulated or complete:  # complete gradients keep the loss scale until the engine's step
            self.scale_gradients(scale / self.loss_scale)
        if self._scale is not None:
            self._scale.value = scale
            self._pass_scale()

    def _pass_scale(self) -> None:
        """Set the engine's loss scale."""
        if self._scale is not None:
            wrapper = self.engine.optimizer
            scaler = getattr(wrapper, "loss_scaler", None) or wrapper.loss_scale_config
            scaler.cur_scale = self._scale.value

    def clip(self, max_norm: float, *, norm_type: float, only: list[Tensor] | None, measured: Measured) -> Measured:
        if norm_type != 2.0:
            raise LoopError(f"clip_grad_norm_(norm_type={norm_type}): ZeRO supports only the L2 norm (2).")
        if only is not None:
            raise LoopError(
                "clip_grad_norm_ got a subset of the optimizer's parameters; under ZeRO all are clipped together.\n"
                "Pass model.parameters() of the prepared model."
            )
        norm = self.gradients.norm()
        if measured.limit != math.inf and torch.isfinite(norm):  # as in plain torch after an earlier clip
            norm = norm.clamp(max=measured.limit)
        limit = min(max_norm, measured.limit)
        if max_norm != math.inf and self._clips_steps and once(self, "clip"):
            announce(
                "clip_grad_norm_: at ZeRO stages 1 to 3 DeepSpeed clips Muon's updates, not the gradients. The "
                "clip, and not lr, then sets the size of a step. Leave the call out, or train at stage 0."
            )
        return Measured(norm=norm, limit=limit)

    def follow_zero_grad(self, zero_grad: Callable[[], None]) -> None:
        """Route `zero_grad` as `Session.follow_zero_grad`. The engine's step still calls the engine's own method."""
        engine, own = self.engine, self.engine.zero_grad

        def routed(set_to_none: bool = True) -> None:  # noqa: ARG001 - as torch's
            (own if engine._running_engine_step else zero_grad)()

        self.patches.replace(engine, "zero_grad", routed)

    def scale_gradients(self, factor: float) -> None:
        for check in self.events.before_scaling:
            check()
        self.gradients.scale(factor)
        for note in self.events.scaled:
            note()

    def complete_gradients(self) -> Measured:
        for check in self.events.before_complete:
            check()
        self._progress.passes += 1
        frozen = self._thaw()
        # The engine acts as at the end of a window. `__dict__` avoids nn.Module's slow __setattr__.
        self.engine.__dict__["_running_engine_step"] = True
        try:
            self.gradients.finalize()
        finally:
            self.engine.__dict__["_running_engine_step"] = False
            if frozen:
                _freeze(frozen)
        for check in self.events.completed:
            check()
        for check in self.events.averages:  # after `finalize`, which names differing branches of the model
            check()
        return Measured()

    def step(self, measured: Measured, *, max_norm: float) -> bool:  # noqa: ARG002 - the engine measures and clips itself
        self.gradients.set_clipping(max_norm if max_norm != math.inf else 0.0)
        self._buffers.send()
        self._follow_weights(begins_step=True)
        for check in self.events.before_step:
            check()
        if self.engine.optimizer is self.optimizer and not self.gradients.are_finite():
            self.drop_gradients(failed=False)  # at stage 0 in fp32, a plain torch optimizer would apply them
            return False
        if self._parts is not None:
            self._parts.begin()
        frozen = self._thaw()
        self.is_stepping = True
        try:
            self._step()
        finally:
            self.is_stepping = False
            if frozen:
                _freeze(frozen)
        applied = bool(self.engine.was_step_applied())
        if self._scale is not None:
            self._scale.update(skipped=not applied)
            self._pass_scale()
        self.last_norm = self.engine.get_global_grad_norm()
        if not applied:
            self.gradients.drop()  # stage 2 with offload in 16 bits would add the next gradients to these
        self._drop_left_out()
        for note in self.events.stepped:
            note(applied)
        return applied

    def copies_to_save(self) -> Sequence[nn.Parameter]:
        """Return `Session.copies_to_save`, at stages 1 and 2 too."""
        return self.trained if self.stage in (1, 2) else self.copies

    def take_written(self) -> dict[int, bool] | None:
        self._follow_weights()
        return self.masters.take_steps() if self.stage > 0 else None

    def first_nonfinite(self) -> str | None:
        return self.gradients.first_nonfinite()

    def agree_to_drop(self) -> None:
        self.gradients.agree_to_drop()

    def drop_gradients(self, *, failed: bool) -> None:
        for check in self.events.before_drop:
            check()
        if failed:
            self.gradients.recover()
        self.gradients.drop()
        self._drop_left_out()
        for note in self.events.dropped:
            note()

    def named_tensors(self, only: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Iterate as `Session.named_tensors`; stage 3 gathers a few parameters at a time."""
        self._require_weights()
        batch: list[tuple[str, Tensor]] = []
        elements = 0
        for name, tensor in persistent_tensors(self.module, only):
            batch.append((name, tensor))
            elements += getattr(tensor, "ds_numel", tensor.numel())
            if elements >= _GATHER_ELEMENTS:
                yield from _gathered(batch)
                batch, elements = [], 0
        yield from _gathered(batch)

    def weight_fragments(self) -> Iterator[Fragment]:
        self._require_weights()
        states.refuse_unreachable(self.engine)
        return states.engine_weights(self.engine)

    def optimized_pieces(self) -> list[OptimizedPiece]:
        states.refuse_unreachable(self.engine)
        self._follow_weights()
        return states.engine_pieces(self.engine)

    def blocks(self, *, changing: bool) -> Iterator[list[OptimizedPiece]]:
        self._follow_weights()
        return states.engine_blocks(self.engine, changing=changing)

    def fetched(self, fragments: Iterable[Fragment], *, changing: bool) -> Iterator[Fragment]:
        return states.fetched_weights(self.engine, fragments, changing=changing)

    def loading(self) -> AbstractContextManager[None]:
        self._follow_weights()  # now, because a later call would overwrite the loaded values
        return states.loading_into_engine(self.engine)

    def update_master_weights(self) -> None:
        self.masters.copy_all()

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        self._follow_weights()  # for earlier writes; at stage 3 they went into empty tensors
        with partitioned_models.whole_weights(self.module):
            yield
        self.masters.note()

    def showing_weights(self, weights: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        return nullcontext() if self._state_dicts is None else self._state_dicts.showing(self.module, weights)

    def loading_state_dicts(self) -> AbstractContextManager[None]:
        return nullcontext() if self._state_dicts is None else self._state_dicts.loading()

    def restore_scale(self, state: Mapping[str, float]) -> None:
        super().restore_scale(state)
        self._pass_scale()

    @property
    def loss_scale(self) -> float:
        return float(getattr(self.engine.optimizer, "loss_scale", 1.0))

    def close(self) -> None:
        if self.engine is None:
            return
        for undo in (*self.undo, self.patches.undo):
            undo()
        release_failed_backward()
        held = self.optimizer.state if self.optimizer is not None else {}
        named = {key: held.pop(key) for key in list(held) if not isinstance(held[key], Mapping)}
        with process_group():  # the engine reads its rank
            lifetime.destroy(self.engine)  # it takes all values in there for the states of tensors
        held.update(named)
        if self._partitioned:
            partitioned_models.end_gathering(self.module)
        self.engine.optimizer = None
        self.engine.basic_optimizer = None
        self.model = self.module
        self.optimizer = None
        self.engine = None
        for release in self.at_end:
            release()
        if self._swap_folders:
            if dist.is_initialized():
                dist.barrier()  # another process may still be writing the last step's states
            remove_swap_folders(self._swap_folders)

    def _require_weights(self) -> None:
        """Raise if the process group has ended, so no weights can be read. At stage 3, follow written weights."""
        if self.engine is None or not dist.is_initialized():
            raise LoopError(
                "DeepSpeed needs the process group to read weights, but the group has ended. The cause is "
                "end_training(), or torch.distributed.destroy_process_group() in this script.\n"
                "Read or save the weights before that."
            )
        if self._partitioned:
            self._follow_weights()

    def _follow_weights(self, *, begins_step: bool = False) -> None:
        """Copy the weights that the script has written since the last call to the master weights."""
        for check in self.events.before_weights:
            check()
        self.masters.follow(begins_step=begins_step)

    def _note_fetch(self, *_: Any) -> None:
        """Count a forward that has to gather all its weights, and so needs the other processes."""
        self._renew_inferred()
        if self.optimizer is None:  # e.g. a teacher: no step would notice written weights
            self._require_weights()
        if self._fetched and all(p.ds_status is ZeroParamStatus.NOT_AVAILABLE for p in self._fetched):
            self._progress.passes += 1

    def _renew_inferred(self, *_: Any) -> None:
        """Release weights that a forward inside `torch.inference_mode` gathered: autograd cannot save them."""
        if torch.is_inference_mode_enabled():
            return
        if any(p.is_inference() and p.ds_status is not ZeroParamStatus.NOT_AVAILABLE for p in self._partitioned):
            states.release_gathered(self.engine)
            states.gather_persistent(self.engine)

    def _await_copy(self) -> None:
        if self.before_change is not None:
            self.before_change()

    def _thaw(self) -> list[nn.Parameter]:
        """Make parameters that were frozen after `prepare` require gradients: DeepSpeed would skip them."""
        frozen = []
        for p in self.trained:
            if not p.requires_grad:
                p.requires_grad = True
                frozen.append(p)
        return frozen

    def _pass_outputs(self) -> None:
        """Check a backward that has reached the outputs. Replaces the engine's hook on all outputs together."""
        if self.engine is None:
            raise LoopError(
                f"the loss of this backward() was computed by a {type(self.module).__name__} before free_memory() or "
                "end_training().\nCall the model that the last prepare() has returned."
            )
        if self.engine._running_engine_backward:
            if self._reduces_in_backward and not self._passed:
                self._progress.passes += 1
            self._passed = True
        elif torch.is_grad_enabled() and self.engine.zero_optimization_partition_weights():
            raise LoopError(
                "torch.autograd.grad(create_graph=True) through a model at ZeRO stage 3: its weights are released "
                "after each use, and a gradient of a gradient would need them again.\nUse stage 2 for a loss that "
                "contains gradients (a gradient penalty)."
            )

    def _pass_output(self, gradient: Tensor) -> Tensor:
        """Refuse a second backward through one forward at stage 3: DeepSpeed gathers the weights once per forward.

        Replaces the engine's hook on each output, which runs after the hook on all of them.
        """
        again = self.engine._running_engine_backward and not self._passed
        if again and any(p.ds_status is ZeroParamStatus.NOT_AVAILABLE for p in self._partitioned):
            raise LoopError(explanations.SECOND_BACKWARD.format(model=type(self.module).__name__))
        return gradient

    def _drop_left_out(self) -> None:
        for p in self.left_out:
            p.grad = None


def _freeze(parameters: list[nn.Parameter]) -> None:
    """Undo `_thaw`."""
    for p in parameters:
        p.requires_grad = False


def _emit_gradient_outside(reference: weakref.ref[EngineSession], method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that emits `gradient_outside`, and then calls a method with the same arguments.

    It is one function, because it runs for each parameter in each backward.

    torch keeps the hook in C++, where Python's garbage collector cannot see it: its reference to the session is weak.
    """

    def emit(*args: Any) -> Any:
        session = reference()
        if session is not None and not session.is_in_backward and not session.may_compute_gradients():
            for check in session.events.gradient_outside:
                check()
        return method(*args)

    return emit


def _gathered(batch: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    with zero.GatheredParameters([tensor for _, tensor in batch]):
        for name, tensor in batch:
            yield name, tensor.detach()


def _returning(engine: Any, method: Callable[..., None]) -> Callable[..., Any]:
    """Make `train` or `eval` of an engine return the engine, as these methods of a module do."""

    def call(*args: Any, **kwargs: Any) -> Any:
        method(*args, **kwargs)
        return engine

    return call


def _clips_steps(wrapper: Any) -> bool:
    """Return whether DeepSpeed's wrapper clips Muon's updates instead of the gradients."""
    partitions = isinstance(wrapper, ZeROOptimizer) and not isinstance(wrapper, BF16_Optimizer)
    return partitions and is_muon(wrapper.optimizer)
