"""The gradients of an accumulation window in an engine: one class for each optimizer wrapper of DeepSpeed.

The engine runs with `managed_gradient_accumulation: false`: gradients accumulate until `engine.step()`, which also
reduces and finalizes them. Here `finalize` does this part before the step, so the norm is known and the gradients can
be rescaled. The engine's own call is disabled.

DeepSpeed keeps gradient buffers from one window to the next. A parameter without a gradient in a window would be
updated with its old gradient, so each class clears the buffers of these parameters.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.utils import combine_grad_norm_groups, get_global_norm_of_tensors
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer, sort_dtypes
from torch import Tensor, nn

from zero_plugin.distributed.collectives import gather_values
from zero_plugin.errors import LoopError
from zero_plugin.strategies.deepspeed.patches import Patches, replaced
from zero_plugin.strategies.events import Events
from zero_plugin.strategies.precision import all_finite


class StepAgreement:
    """A check before a step that all processes apply the gradients, and none drops them.

    A guard may add its own digest to the same small collective.

    Args:
        device: the device of the comparison.

    Attributes:
        digest: a guard's number, which has to be equal on all processes too.
        describe: returns the message of an error, from whether this process ends its window and whether it drops
            gradients. Collective.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_alone = dist.get_world_size() == 1
        self.digest = 0
        self.describe: Callable[[bool, bool], str] = _describe_drops

    def confirm(self, *, ends: bool = False, drops: bool = False) -> None:
        """Compare with the other processes. Collective.

        Args:
            ends: whether the window ends; the error message uses it.
            drops: whether this process is about to drop the gradients instead of applying them.

        Raises:
            LoopError: on every process, if some processes drop what others apply, or their digests differ.
        """
        if self._is_alone:
            return
        # Hashes of integers are equal in all processes. The shift makes the number negatable.
        number = hash((self.digest, drops)) >> 1
        both = torch.tensor([number, -number], device=self._device)
        dist.all_reduce(both, dist.ReduceOp.MAX)
        largest, negated_smallest = both.tolist()
        if largest != -negated_smallest:
            raise LoopError(self.describe(ends, drops))


def _describe_drops(ends: bool, drops: bool) -> str:  # noqa: ARG001
    return describe_drops(gather_values(drops))


def describe_drops(drops: list[bool]) -> str:
    """Return the message for processes that drop gradients which others apply; `drops` has one value per process."""
    return (
        f"zero_grad() drops gradients on {sum(drops)} of {len(drops)} processes, e.g. on rank {drops.index(True)}, "
        "which the others apply in step(). If a batch decides whether to step, let all processes decide alike, by "
        'a value that all have, e.g. accelerator.reduce(loss, "mean").'
    )


class EngineGradients(ABC):
    """The operations of a session on the accumulated gradients. `finalize` and `norm` are collective."""

    def __init__(self, engine: Any, events: Events, patches: Patches) -> None:
        self._engine = engine
        self._wrapper: Any = engine.optimizer
        self._events = events
        self._patches = patches

    agreement: StepAgreement | None = None  # set if backwards reduce gradients

    def emit_from_hooks(self) -> None:  # noqa: B027 - nothing to emit if `finalize` reduces gradients
        """Emit `before_reduce` and `before_gather` from DeepSpeed's methods, if a guard has subscribed to them."""

    def numbered_parameters(self) -> dict[int, nn.Parameter]:
        """Return the parameters by the ids of `before_reduce` and `before_gather`."""
        return {}

    def before_backward(self, *, is_first: bool) -> None:  # noqa: B027 - nothing to do if gradients start as None
        """Prepare a backward of the window."""

    def has_reached(self, parameter: nn.Parameter) -> bool:
        """Return whether a backward of the window gave the parameter a gradient here; call it before `finalize`."""
        return parameter.grad is not None

    @abstractmethod
    def scale(self, factor: float) -> None:
        """Multiply the window's gradients so far by `factor`; call it before `finalize`."""

    @abstractmethod
    def finalize(self) -> None:
        """Reduce the gradients that are not reduced yet, and move them to where the step reads them.

        A parameter without a gradient on this process takes part with zeros, in the same order on every process. The
        session makes the engine act as at the end of a window, as `engine.step()` does.

        Raises:
            LoopError: on every process, if some processes drop the gradients; see `StepAgreement`.
        """

    @abstractmethod
    def norm(self) -> Tensor:
        """Return the global L2 norm of the finalized, unscaled gradients; `inf` if one of them is not finite."""

    def are_finite(self) -> bool:
        """Return whether all finalized gradients are finite; the same on every process."""
        return bool(torch.isfinite(self.norm()))

    @abstractmethod
    def held(self, parameter: nn.Parameter) -> Tensor | None:
        """Return this process's part of the parameter's finalized gradient, or None."""

    def first_nonfinite(self) -> str | None:
        """Return the name of the first parameter whose gradient is not finite, before the step, or None.

        Each process checks its partitions. One collective serves all parameters.
        """
        named = list(self._engine.module.named_parameters())
        found = torch.zeros(len(named), dtype=torch.int32, device=self._engine.device)
        for index, (_, parameter) in enumerate(named):
            gradient = self.held(parameter)
            if gradient is not None:
                found[index] = ~torch.isfinite(gradient).all()
        dist.all_reduce(found, dist.ReduceOp.MAX)
        indices = found.nonzero().flatten().tolist()
        return str(named[indices[0]][0]) if indices else None

    def set_clipping(self, max_norm: float) -> None:
        """Have the engine clip its next step at `max_norm`; 0 for no clipping."""
        self._wrapper.clip_grad = max_norm

    def agree_to_drop(self) -> None:
        """Confirm a `drop` instead of `finalize`, if no backward has failed. Collective.

        Raises:
            LoopError: on every process, if other processes finalize the gradients.
        """
        if self.agreement is not None:
            self.agreement.confirm(drops=True)

    @abstractmethod
    def drop(self) -> None:
        """Drop the accumulated gradients."""

    def recover(self) -> None:  # noqa: B027 - nothing to do if gradients are only in `param.grad`
        """Reset the unfinished reductions and gathers of a failed backward, before `drop`."""


def engine_gradients(engine: Any, events: Events, patches: Patches) -> EngineGradients:
    """Return an object of the class for `engine.optimizer`."""
    wrapper = engine.optimizer
    kind: type[EngineGradients] = ReplicatedGradients
    if isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
        kind = Stage3Gradients
    elif isinstance(wrapper, BF16_Optimizer):
        kind = Bf16Stage1Gradients
    elif isinstance(wrapper, DeepSpeedZeroOptimizer):
        kind = FlatGradients
    return kind(engine, events, patches)


def _finite_or_inf(norm: Tensor) -> Tensor:
    # DeepSpeed marks a non-finite norm by -1. A nan also fails `>= 0`.
    norm = norm.detach().float().reshape(())
    return torch.where(norm >= 0, norm, float("inf"))


def is_muon(optimizer: object) -> bool:
    """Return whether the optimizer's step changes the gradients before DeepSpeed measures and clips them."""
    return "muon" in type(optimizer).__name__.lower()


class ReplicatedGradients(EngineGradients):
    """The gradients of stage 0: every process has all gradients, in `param.grad`."""

    def __init__(self, engine: Any, events: Events, patches: Patches) -> None:
        super().__init__(engine, events, patches)
        groups = getattr(self._wrapper, "fp16_groups", None)
        if groups is None:  # torch's own optimizer in fp32, or none
            groups = [group["params"] for group in getattr(self._wrapper, "param_groups", ())]
        self._parameters = [p for group in groups for p in group]
        self._measure = functools.cache(self._norm_of_gradients)
        patches.replace(engine, "enable_backward_allreduce", False)
        patches.replace(engine, "clip_fp32_gradients", self._clip)

    def scale(self, factor: float) -> None:
        if gradients := self._gradients():
            torch._foreach_mul_(gradients, factor)

    def finalize(self) -> None:
        self._measure.cache_clear()
        self._engine.allreduce_gradients()

    def norm(self) -> Tensor:
        return _finite_or_inf(self._measure())

    def held(self, parameter: nn.Parameter) -> Tensor | None:
        return parameter.grad

    def are_finite(self) -> bool:
        """Return whether all gradients are finite; cheaper than the norm."""
        return all_finite(self._gradients())

    def set_clipping(self, max_norm: float) -> None:
        self._engine._config.gradient_clipping = max_norm  # read in fp32
        super().set_clipping(max_norm)  # read by the 16-bit wrappers

    def drop(self) -> None:
        for p in self._parameters:
            p.grad = None

    def _clip(self) -> None:
        # In fp32, the engine's own clipping would compute the norm again and average it over the processes.
        max_norm = self._engine.gradient_clipping()
        torch.nn.utils.clip_grads_with_norm_(self._parameters, max_norm, self._measure())

    def _norm_of_gradients(self) -> Tensor:
        norm = torch.nn.utils.get_total_norm([g.float() for g in self._gradients()])
        scale = getattr(self._wrapper, "loss_scale", 1.0)  # a plain torch optimizer, in fp32, has none
        return norm / scale

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]


class Bf16Stage1Gradients(EngineGradients):
    """The gradients of stage 1 in bf16, accumulated in fp32: every process has all of them."""

    def __init__(self, engine: Any, events: Events, patches: Patches) -> None:
        super().__init__(engine, events, patches)
        self._places = {id(p): (i, j) for i, group in enumerate(self._wrapper.bf16_groups) for j, p in enumerate(group)}
        patches.replace(engine, "enable_backward_allreduce", False)

    def has_reached(self, parameter: nn.Parameter) -> bool:
        group, index = self._places[id(parameter)]
        return bool(self._wrapper.fp32_groups_has_gradients[group][index])

    def scale(self, factor: float) -> None:
        torch._foreach_mul_(list(self._wrapper.fp32_groups_gradients_flat), factor)

    def finalize(self) -> None:
        self._engine.allreduce_gradients()
        # Norm and clipping must include parameters that got a gradient on any process: the sum contains it.
        self._wrapper.fp32_groups_has_gradients = [[True] * len(group) for group in self._wrapper.bf16_groups]

    def norm(self) -> Tensor:
        gradients, _ = self._wrapper.get_grads_for_norm()
        return _finite_or_inf(torch.as_tensor(get_global_norm_of_tensors(gradients)))

    def held(self, parameter: nn.Parameter) -> Tensor | None:
        if id(parameter) not in self._places:
            return None
        group, index = self._places[id(parameter)]
        gradient: Tensor = self._wrapper.fp32_groups_gradients[group][index]
        return gradient

    def drop(self) -> None:
        self._wrapper.zero_grad(set_to_none=True)


class FlatGradients(EngineGradients):
    """The gradients of stages 1 and 2, reduced: each process has its flat partition, on the device or the CPU."""

    def __init__(self, engine: Any, events: Events, patches: Patches) -> None:
        super().__init__(engine, events, patches)
        self._partitioned = bool(self._wrapper.partition_gradients)  # stage 2
        self._own = [p for group in self._wrapper.params_in_partition for p in group if p.requires_grad]
        if self._partitioned:
            patches.replace(self._wrapper, "finalize_gradient_accumulation_boundary", lambda: None)
            self.agreement = StepAgreement(engine.device)
        else:
            patches.replace(engine, "enable_backward_allreduce", False)
        # The step uses the norm that `norm` computed, instead of computing and reducing it again.
        measure = functools.cache(self._wrapper.scaled_global_norm)
        self._forget_norm = measure.cache_clear
        if not is_muon(self._wrapper.optimizer):
            patches.replace(self._wrapper, "scaled_global_norm", measure)

    def emit_from_hooks(self) -> None:
        if self._partitioned and self._events.before_reduce:
            self._patches.precede(self._wrapper, "reduce_ipg_grads", self._emit_before_reduce)

    def numbered_parameters(self) -> dict[int, nn.Parameter]:
        return {self._wrapper.get_param_id(p): p for group in self._wrapper.bit16_groups for p in group}

    def before_backward(self, *, is_first: bool) -> None:
        if not is_first and self._wrapper.cpu_offload and self._partitioned:
            for param_id in self._without_gradient():
                if (kept := self._wrapper.accumulated_grads_in_cpu.get(param_id)) is not None:
                    kept.zero_()

    def has_reached(self, parameter: nn.Parameter) -> bool:
        return self._wrapper.get_gradient_for_reduction(parameter) is not None

    def scale(self, factor: float) -> None:
        wrapper = self._wrapper
        if not self._partitioned:
            gradients = [wrapper.get_gradient_for_reduction(p) for group in wrapper.bit16_groups for p in group]
            torch._foreach_mul_([g for g in gradients if g is not None], factor)
            return
        if wrapper.cpu_offload:
            wrapper._wait_for_offload_copies()  # into the tensors that are multiplied here
        for i in range(len(wrapper.bit16_groups)):
            if wrapper._use_compact_grad_partition_buffer(i):
                if (kept := wrapper.averaged_gradients.get(i)) is not None:
                    kept.flat_partition.mul_(factor)
            elif wrapper.cpu_offload:
                for p in wrapper.params_in_partition[i]:
                    if (in_host := wrapper.accumulated_grads_in_cpu.get(wrapper.get_param_id(p))) is not None:
                        in_host.mul_(factor)
            elif wrapper.all_grad_tensors.get(i):
                torch._foreach_mul_(list(wrapper.all_grad_tensors[i]), factor)

    def finalize(self) -> None:
        wrapper = self._wrapper
        self._forget_norm()
        if self.agreement is not None:
            self.agreement.confirm(ends=True)
            type(wrapper).finalize_gradient_accumulation_boundary(wrapper)
        else:
            self._fill_missing_with_zeros()
            # Stage 1 reduces once per window, whatever the number of backwards. CPU memory holds the gradients of
            # the previous window, so DeepSpeed must not add to them.
            wrapper.micro_step_id = -1
            self._engine.allreduce_gradients()
        if wrapper.cpu_offload and self._partitioned:
            for param_id in self._without_gradient():
                group, _, offset, count = wrapper.grad_position[param_id]
                wrapper.single_partition_of_fp32_groups[group].grad.view(-1).narrow(0, offset, count).zero_()

    def norm(self) -> Tensor:
        norm = _finite_or_inf(self._wrapper.scaled_global_norm() / self._wrapper.loss_scale)
        if self._wrapper.cpu_offload and self._wrapper.dtype == torch.float16 and self._wrapper.local_overflow:
            return torch.full_like(norm, float("inf"))
        return norm

    def held(self, parameter: nn.Parameter) -> Tensor | None:
        mapping: Any = getattr(parameter, "_hp_mapping", None)  # set on the parameters in this process's partition
        if mapping is None:
            return None
        gradient: Tensor = mapping.get_lp_grad_fragment(parameter._index_in_param_group)  # type: ignore[attr-defined]
        return gradient

    def drop(self) -> None:
        wrapper = self._wrapper
        wrapper.zero_grad(set_to_none=True)
        for buffers in (wrapper.averaged_gradients, wrapper.all_grad_tensors):
            for group in list(buffers):
                buffers[group] = None
        wrapper.reset_cpu_buffers()
        wrapper.micro_step_id = -1
        if wrapper.cpu_offload:
            wrapper._offload_accumulated_param_ids = set()

    def recover(self) -> None:
        wrapper = self._wrapper
        get_accelerator().synchronize()
        for bucket in wrapper.ipg_buckets.values():
            bucket.clear()
        wrapper.extra_large_param_to_reduce.clear()
        wrapper.params_already_reduced = [False] * len(wrapper.params_already_reduced)
        wrapper._release_ipg_buffers()
        wrapper.clear_backward_seen_flag()

    def _without_gradient(self) -> list[int]:
        """Return this process's parameters without a gradient in the window so far (stage 2, offloaded gradients)."""
        seen = self._wrapper._offload_accumulated_param_ids
        ids = [self._wrapper.get_param_id(p) for p in self._own]
        return [i for i in ids if i not in seen]

    def _fill_missing_with_zeros(self) -> None:
        """Set missing gradients to zero: stage 1 reduces existing ones, which must be the same on all processes."""
        wrapper = self._wrapper
        kept_apart = wrapper.use_grad_accum_attribute
        for group in wrapper.bit16_groups:
            for p in group:
                if kept_apart and p.grad_accum is None:
                    p.grad_accum = torch.zeros_like(p, dtype=wrapper.gradient_accumulation_dtype)
                elif not kept_apart and p.grad is None:
                    p.grad = torch.zeros_like(p)

    def _emit_before_reduce(self, comm_dtype: Any = None) -> None:
        buckets = self._wrapper.ipg_buckets
        for dtype in sort_dtypes(buckets.keys()) if comm_dtype is None else [comm_dtype]:
            ids = [number for _, _, number in buckets[dtype].params]
            for check in self._events.before_reduce:
                check(ids)


class Stage3Gradients(EngineGradients):
    """The gradients of stage 3, reduced: each process has its partition of every gradient, in one flat buffer."""

    def __init__(self, engine: Any, events: Events, patches: Patches) -> None:
        super().__init__(engine, events, patches)
        patches.replace(self._wrapper, "finalize_gradient_accumulation_boundary", lambda: None)
        measure = functools.cache(self._wrapper._get_norm_groups)  # as at stage 2
        self._forget_norm = measure.cache_clear
        if not is_muon(self._wrapper.optimizer):
            patches.replace(self._wrapper, "_get_norm_groups", measure)
        self._own = {
            p.ds_id: p
            for group in self._wrapper.fp16_groups
            for p in group
            if p.requires_grad and p.partition_numel() * self._wrapper._get_param_partition_rank(p) < p.ds_numel
        }
        self.agreement: StepAgreement = StepAgreement(engine.device)

    def emit_from_hooks(self) -> None:
        patches, wrapper = self._patches, self._wrapper
        if self._events.before_reduce:
            patches.precede(
                wrapper, "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads", self._emit_before_reduce
            )
        if self._events.before_gather:
            coordinator = wrapper.parameter_offload.get_param_coordinator()
            patches.precede(
                coordinator, "_PartitionedParameterCoordinator__all_gather_params", self._emit_before_gather
            )

    def numbered_parameters(self) -> dict[int, nn.Parameter]:
        return {p.ds_id: p for p in self._engine.module.parameters()}

    def before_backward(self, *, is_first: bool) -> None:
        # DeepSpeed counts a backward when the next forward starts. Without this line, a second backward before the
        # next forward would overwrite the gradients of the first.
        self._wrapper.micro_step_id = 0 if is_first else 1
        if not is_first:
            self._clear_without_gradient()

    def scale(self, factor: float) -> None:
        self._wrapper.grad_partitions_flat_buffer.mul_(factor)

    def finalize(self) -> None:
        wrapper = self._wrapper
        self.agreement.confirm(ends=True)
        self._forget_norm()
        self._clear_without_gradient()
        if wrapper.offload_optimizer:
            # Finalize parameters without a gradient too, as zeros: the step's CPU and NVMe buffers hold old gradients.
            wrapper._offload_boundary_param_ids = set(self._own)
        # For NVMe, DeepSpeed holds fp32 gradients on the device until the last is ready: pass one sub-group at a time.
        groups = wrapper.fp16_groups
        if not getattr(wrapper, "swap_optimizer", False):
            type(wrapper).finalize_gradient_accumulation_boundary(wrapper)
            return
        for group in groups:
            with replaced(wrapper, "fp16_groups", [group]):
                type(wrapper).finalize_gradient_accumulation_boundary(wrapper)

    def norm(self) -> Tensor:
        return _finite_or_inf(combine_grad_norm_groups(self._wrapper._get_norm_groups()) / self._wrapper.loss_scale)

    def held(self, parameter: nn.Parameter) -> Tensor | None:
        partitions: dict[int, Tensor] = self._wrapper._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        return partitions.get(getattr(parameter, "ds_id", -1))

    def drop(self) -> None:
        # The first backward of the next window overwrites its gradients; `_clear_without_gradient` zeroes the others.
        self._wrapper._offload_boundary_param_ids = set()

    def recover(self) -> None:
        wrapper = self._wrapper
        get_accelerator().synchronize()
        for group in wrapper.fp16_groups:
            for p in group:
                p.grad = None
        for bucket in wrapper.ipg_buckets.values():
            bucket.clear_params()
        wrapper.params_already_reduced = dict.fromkeys(wrapper.params_already_reduced, False)
        wrapper.parameter_offload.release_backward_leftovers()
        wrapper.clear_backward_seen_flag()

    def _emit_before_reduce(self, dtype: Any) -> None:
        ids = [p.ds_id for p in self._wrapper.ipg_buckets[dtype].params]
        for check in self._events.before_reduce:
            check(ids)

    def _emit_before_gather(self, parameters: Iterable[Any], *_: Any, **__: Any) -> None:
        ids = [p.ds_id for p in parameters if p.ds_status is ZeroParamStatus.NOT_AVAILABLE]
        for check in self._events.before_gather if ids else ():
            check(ids)

    def _clear_without_gradient(self) -> None:
        seen = self._wrapper._offload_boundary_param_ids
        if len(seen) < len(self._own):
            partitions = self._wrapper._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
            for ds_id in self._own.keys() - seen:
                partitions[ds_id].zero_()
