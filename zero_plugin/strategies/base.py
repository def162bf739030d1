"""What a strategy and a session are: the seam between the loop and the strategies."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_plugin.config.choices import DistributedType
from zero_plugin.config.placeholders import DummyOptim
from zero_plugin.config.plugins import AutocastKwargs, Handlers
from zero_plugin.config.resolve.facts import Resolved, StrategyName
from zero_plugin.distributed.processes import Processes
from zero_plugin.errors import LoopError
from zero_plugin.strategies.optimizer_only import UnpreparedOptimizer
from zero_plugin.strategies.optimizer_states import OptimizedPiece
from zero_plugin.strategies.window import AccumulationWindow
from zero_plugin.tensors.fragments import Fragment, whole_fragment
from zero_plugin.tensors.modules import allot_whole, persistent_tensors

DIRECT_BACKWARD = (
    "gradients came to this model from loss.backward().\n"
    "Call accelerator.backward(loss), which knows the accumulation window and the loss scale."
)
OWN_GRADIENTS = (
    "the script has changed or set a parameter's grad, and optimizer.step() would not apply it: ZeRO steps by "
    "partitions of what backward() has made.\nClip by accelerator.clip_grad_norm_(). Change gradients where they are "
    "made, by p.register_hook(lambda gradient: …) before the forward. DDP, one device, stage 0, and stage 1 in fp32 "
    "step by a p.grad that is set between backward() and step() or clip_grad_norm_()."
)
FAILED_BACKWARD = (
    "a backward of this model has failed and left a part of its gradients behind.\n"
    "Call optimizer.zero_grad() before you go on: it drops the window's gradients, and the window begins anew."
)
LOSS_OF_OTHERS = (
    "the loss of this backward() depends on no trained parameter of the prepared model, and was multiplied by its loss "
    "scale.\nCall loss.backward() for what is not prepared."
)
LATE_BACKWARD = (
    "backward() after clip_grad_norm_() and before optimizer.step(): the clipped norm would not be the step's.\n"
    "Call clip_grad_norm_() after the window's last backward()."
)


class Saving(NamedTuple):
    """A change of the configuration that takes less device memory.

    Attributes:
        text: what to write.
        changes: the fields of a plan's `Setup` that it changes.
    """

    text: str
    changes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """What `prepare` asks a strategy to build.

    Attributes:
        model: the user's module.
        optimizer: the user's optimizer or placeholder; None for a model that is not trained.
        resolved: the configuration without open fields.
        schedulers: the learning-rate schedulers that were built on `optimizer`. A strategy that replaces the optimizer
            object moves them to the new one.
        is_placed: whether the model goes to this process' device; else it stays where the script has put it.
        only_evaluates: whether the model is never trained; else one without an optimizer may still get one.
    """

    model: nn.Module
    optimizer: Optimizer | DummyOptim | None
    resolved: Resolved
    schedulers: tuple[Any, ...]
    is_placed: bool = True
    only_evaluates: bool = False


class Session(ABC):
    """One model with its optimizer, ready to train. It exists only when it is built completely.

    The loop decides *when* a window of accumulation ends; a session decides *how* gradients are computed, reduced,
    clipped and applied. Gradients add up over `backward` calls until `step` or `drop_gradients`.

    Attributes:
        model: what the loop calls.
        module: the user's own module inside it.
        optimizer: the torch optimizer whose `param_groups` are live; None for a model that is not trained.
        most_skips: skipped steps in a row after which the run stops.
        last_norm: norm of the last step's gradients before clipping, where one was computed.
        unpartitioned_gradients: whether `p.grad` of the user's own parameters holds the complete gradient of the step,
            as in plain torch; False where gradients are partitioned.
        unpartitioned_states: whether the optimizer's `state` has the user's own parameters as keys, as in plain torch.
        states_are: where else all its states are, so that `state_dict` has not them; "" where it has.
        left_out: parameters that get gradients and are in no group of the optimizer.
        step_hooks: that the script has registered on its optimizer, before and after a step, where the optimizer that
            runs does not call them once for each step.
        cleared_by_script: whether `p.grad` of all was None where a window began after an applied one; None where a step
            leaves no gradients, so that it cannot be seen.
        failed: whether a backward raised when it may have added some of its gradients; `drop_gradients` mends it.
        states_stay: whether optimizer states and masters lie in memory, unchanged, from one step to the next.
        leaves_files: whether `close` has files to remove, and is collective.
        before_change: called before a step, or anybody else, changes states or masters; a copy that is being made of
            them sets it.
    """

    unpartitioned_gradients = True
    unpartitioned_states = True
    states_are = ""
    states_stay = True
    leaves_files = False
    before_change: Callable[[], None] | None = None
    cleared_by_script: bool | None = None
    failed = False
    left_out: Sequence[nn.Parameter] = ()
    step_hooks: tuple[Mapping[int, Any], Mapping[int, Any]] = ({}, {})

    model: nn.Module
    module: nn.Module
    optimizer: Optimizer | None
    most_skips: int
    last_norm: Tensor | float | None = None

    def backward(self, loss: Tensor, *, ends_window: bool = True, **kwargs: Any) -> None:
        """Add the gradients of `loss`, a scalar that no other trained model takes part in; never steps."""
        self.open_backward(ends_window=ends_window, loss=loss)
        try:
            torch.autograd.backward(self.scale_loss(loss), **kwargs)
        except BaseException:
            self.abandon_backward(reached=True)
            raise
        self.close_backward(reached=True)

    def explain(self, error: BaseException) -> LoopError | None:  # noqa: ARG002
        """What to raise in place of another library's error in a backward; None where that one is clear enough."""
        return None

    @abstractmethod
    def open_backward(self, *, ends_window: bool, loss: Tensor) -> None:
        """A backward that may reach this model is about to run; then `close_backward` or `abandon_backward`.

        Not for a model that is not trained.

        Args:
            ends_window: whether it is the last before `step`, if it reaches this model.
            loss: where it begins.

        Raises:
            LoopError: gradients are there that no opened backward made, or one that failed.
        """

    @abstractmethod
    def close_backward(self, *, reached: bool) -> None:
        """The backward has run, through whatever models. Collective where `reached` and gradients are partitioned.

        Args:
            reached: whether it added gradients to this model.

        Raises:
            LoopError: it did, after `clip` and before `step`.
        """

    @abstractmethod
    def abandon_backward(self, *, reached: bool) -> None:
        """The backward raised.

        Args:
            reached: whether it may have added gradients to this model before.
        """

    @abstractmethod
    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss times `loss_scale`."""

    @abstractmethod
    def set_loss_scale(self, scale: float) -> None:
        """Go on with another loss scale; the window's gradients are rescaled."""

    @abstractmethod
    def follow_window(self, ends_window: Callable[[], bool]) -> None:
        """Ask `ends_window` before each forward whether the backward to come is the window's last."""

    def follow_zero_grad(self, zero_grad: Callable[[], None]) -> None:
        """Have `zero_grad()` of the model do the same as its optimizer's, `zero_grad`."""
        _route_zero_grad(self.model, zero_grad)

    @abstractmethod
    def clip(self, max_norm: float, *, norm_type: float, only: list[Tensor] | None) -> Tensor:
        """Clip the coming step at `max_norm` and return the norm before clipping (scalar, fp32), at once. Collective.

        Args:
            max_norm: `inf` only measures.
            norm_type: 2 for the L2 norm.
            only: the parameters that count; None for all of the optimizer's.

        Raises:
            LoopError: `norm_type` or `only` cannot be had where gradients are partitioned.
        """

    @abstractmethod
    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients of the window by `factor`, before `clip` and `step`."""

    @abstractmethod
    def step(self) -> bool:
        """Apply the gradients and clear them. False if the step was skipped for non-finite gradients. Collective."""

    @abstractmethod
    def first_nonfinite(self) -> str | None:
        """Before `step`: name of the first parameter whose gradient is not finite, None if none is. Collective."""

    @abstractmethod
    def drop_gradients(self) -> None:
        """Forget every gradient of the window."""

    @abstractmethod
    def drop_foreign_gradients(self) -> None:
        """Forget gradients that no `backward` of this session made, as `zero_grad` before a backward does."""

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside stay local where the strategy can; harmless where it cannot."""

    @abstractmethod
    def named_tensors(self, only: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Whole weights and buffers by name, one at a time; collective, every rank gets each tensor.

        Args:
            only: the names that are wanted, the same on all ranks; None for all.
        """

    @abstractmethod
    def weight_fragments(self) -> Iterator[Fragment]:
        """The module's parameters and buffers, as they lie in this process; `weight` kind. Not collective.

        Raises:
            CheckpointError: they lie where a checkpoint cannot reach them yet.
        """

    @abstractmethod
    def optimized_pieces(self) -> list[OptimizedPiece]:
        """The trained parameters, as they lie in what the optimizer steps; none of a model that is not trained.

        Raises:
            CheckpointError: as for `weight_fragments`.
        """

    def blocks(self, *, changing: bool) -> Iterator[list[OptimizedPiece]]:  # noqa: ARG002
        """The `optimized_pieces`, some at a time: those of one list are in memory until the next list is asked for.

        Args:
            changing: what is in memory is going to be changed, inside `reading`; else it is only looked at.
        """
        yield self.optimized_pieces()

    def fetched(self, fragments: Iterable[Fragment], *, changing: bool) -> Iterator[Fragment]:  # noqa: ARG002
        """`weight_fragments` that no `blocks` have brought, each in memory until the next is asked for.

        Args:
            fragments: of weights that are not trained.
            changing: as in `blocks`.
        """
        yield from fragments

    @abstractmethod
    def reading(self) -> AbstractContextManager[None]:
        """Inside, weights, masters and optimizer states are replaced in their fragments; collective."""

    @abstractmethod
    def update_master_weights(self) -> None:
        """The module's weights were changed otherwise: go on from them."""

    def whole_weights(self) -> AbstractContextManager[None]:
        """Inside, the weights are whole on every process, and what is written to them stays. Collective."""
        return nullcontext()

    @abstractmethod
    def scale_state(self) -> dict[str, float]:
        """Where the loss scale stands: see `LossScale.state`; empty where there is none."""

    @abstractmethod
    def restore_scale(self, state: Mapping[str, float]) -> None:
        """Go on from a `scale_state`, if this session scales at all and the scale is not fixed by the configuration."""

    def reduction_state(self) -> list[list[str]]:
        """Which parameters' gradients are summed together, where that may change; the same on all processes."""
        return []

    def restore_reduction(self, state: list[list[str]]) -> None:  # noqa: B027 - nothing to do where it never changes
        """Sum gradients as where `reduction_state` was asked for. Collective."""

    @property
    @abstractmethod
    def loss_scale(self) -> float:
        """The factor on the loss under fp16; 1.0 otherwise."""

    @abstractmethod
    def close(self) -> None:
        """Drop what would keep the process group busy; the session is unusable afterwards."""


class Strategy(ABC):
    """A way of training. It decides whether it can run here, and builds sessions.

    Attributes:
        distributed_type: what scripts written for Accelerate call it.
        handlers: what a script set of torch's own objects; see `accept`.
        optimizer_may_follow: whether a model prepared without its optimizer can still get it, in `add_optimizer`, and
            until then has its gradients averaged over the processes, or refuses a backward.
    """

    name: StrategyName
    distributed_type: DistributedType
    handlers = Handlers()
    optimizer_may_follow = False

    @abstractmethod
    def refuse(self) -> str | None:
        """Why this strategy cannot run here, or None if it can."""

    @abstractmethod
    def build_session(self, request: SessionRequest, processes: Processes) -> Session:
        """A complete session for `request`."""

    def add_optimizer(self, session: Session, request: SessionRequest) -> None:  # noqa: ARG002
        """Train the model of `session`, which was built without an optimizer, with the request's.

        Raises:
            LoopError: it cannot be done any more.
        """
        raise LoopError(
            f"prepare() got the optimizer of the {type(request.model).__name__} in a later call than the model; under "
            "ZeRO both are partitioned together.\nPass them in one call: model, optimizer = prepare(model, optimizer)."
        )

    def hold_optimizer(self, optimizer: Optimizer, window: AccumulationWindow) -> UnpreparedOptimizer:
        """What an optimizer steps with whose model is not prepared yet."""
        return UnpreparedOptimizer(optimizer, window, steps=False)

    def reduce_next_backward(self, session: Session) -> AbstractContextManager[None]:  # noqa: ARG002
        """The next backward inside averages the gradients, also those of forwards that ran inside `no_sync`."""
        return nullcontext()

    def join(self, joinables: list[Any], *, enable: bool) -> AbstractContextManager[Any] | None:  # noqa: ARG002
        """Let processes that have fewer batches follow the others' collectives; None where that cannot be had.

        Args:
            joinables: models that know how to follow.
            enable: False does nothing.
        """
        return None

    def accept(self, handlers: Handlers) -> list[str]:
        """Build sessions with what a script set of torch's own objects.

        Returns:
            Lines on what has no effect here.

        Raises:
            ConfigError: this strategy cannot honour it.
        """
        self.handlers = handlers
        return []

    def autocast(self, precision: str, handler: AutocastKwargs | None) -> AbstractContextManager[Any]:  # noqa: ARG002
        """What a script computes inside, it computes as prepared models do.

        Args:
            precision: `no`, `fp16` or `bf16`.
            handler: arguments of `torch.autocast`.
        """
        return nullcontext()

    def init_model(self) -> AbstractContextManager[None]:
        """A model made inside is never whole in any process, where the strategy partitions parameters."""
        return nullcontext()

    def allot(self, module: nn.Module, device: torch.device) -> None:
        """Give tensors on the meta device memory for what this process keeps of them, with no values yet. Collective.

        Args:
            module: not prepared yet.
            device: where it is going to be; partitioned parameters go where the configuration says.

        Raises:
            CheckpointError: its partitions cannot be filled from files.
        """
        allot_whole(module, device)

    def fragments_to_fill(self, module: nn.Module, names: Collection[str]) -> Iterator[Fragment]:
        """Some parameters and buffers of a module that is not prepared, as they lie in this process.

        What is written into a fragment until the next is asked for stays; all of it has to be written.
        """
        for name, tensor in persistent_tensors(module, names):
            yield whole_fragment(name, tensor, 0, 1)

    def whole_tensors(self, tensors: Iterable[Tensor]) -> AbstractContextManager[None]:  # noqa: ARG002
        """Inside, tensors of a module that is not prepared are whole; what process 0 writes stays. Collective."""
        return nullcontext()

    @property
    def partitions_parameters(self) -> bool:
        """Whether no process holds whole parameters."""
        return False

    def zero_stage(self, resolved: Resolved) -> Literal[0, 1, 2, 3] | None:  # noqa: ARG002
        """The ZeRO stage in which this strategy runs a configuration; None where it runs it without ZeRO."""
        return None

    def remove_leftover_files(self, resolved: Resolved, processes: Processes) -> None:  # noqa: ARG002
        """Remove what runs that were killed have left where this one will put files."""
        return

    def savings(self, resolved: Resolved) -> tuple[Saving, ...]:  # noqa: ARG002
        """What to write into the configuration so that a process needs less device memory, the cheapest first.

        Args:
            resolved: what runs.
        """
        return (
            Saving("ZeRO, which divides gradients and optimizer states: zero_stage: 2", {"stage": 2}),
            Saving("zero_stage: 3, which divides parameters too", {"stage": 3}),
            Saving(
                "zero_stage: 2 with offload_optimizer_device: cpu, which keeps optimizer states in host memory",
                {"stage": 2, "offload_optimizer": "cpu"},
            ),
        )

    def forget_dropped(self) -> None:  # noqa: B027 - most keep nothing
        """The script has dropped its `Accelerator`: let go of what a library keeps of its models. Not collective."""

    def destroy_process_group(self) -> None:
        """End the process group, with whatever keeps hold of it."""
        if dist.is_initialized():  # else another strategy of this process has ended it
            dist.destroy_process_group()

    def load_pretrained(self, partitioned: bool | None = None) -> AbstractContextManager[None]:  # noqa: ARG002
        """The same for what transformers' `from_pretrained` makes inside; entered for the whole run.

        Args:
            partitioned: whether it does so inside; None as the configuration says.
        """
        return nullcontext()


def _route_zero_grad(model: nn.Module, zero_grad: Callable[[], None]) -> None:
    own = type(model).zero_grad

    @functools.wraps(own)
    def routed(this: nn.Module, set_to_none: bool = True) -> None:
        if this is model:
            zero_grad()
        else:  # a copy
            own(this, set_to_none)

    model.zero_grad = MethodType(routed, model)  # type: ignore[method-assign]
