"""`Strategy` and `Session`: the interface between the training loop and the ways to run a training step."""

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

from zero_plugin.config.choices import Checks, DistributedType
from zero_plugin.config.handlers import AutocastKwargs, Handlers
from zero_plugin.config.placeholders import DummyOptim
from zero_plugin.config.resolve.facts import Resolved, StrategyName
from zero_plugin.distributed.collectives import num_processes, process_index
from zero_plugin.distributed.processes import Processes
from zero_plugin.errors import LoopError
from zero_plugin.strategies.events import Events
from zero_plugin.strategies.optimizer_only import UnpreparedOptimizer
from zero_plugin.strategies.optimizer_states import OptimizedPiece, unpartitioned_pieces
from zero_plugin.strategies.precision import DEFAULT_MOST_SKIPS, FoundInf, LossScale, Measured
from zero_plugin.tensors.modules import Fragment, allocate_unpartitioned, persistent_tensors, unpartitioned_fragment

DIRECT_BACKWARD = (
    "gradients of this model were computed by loss.backward().\n"
    "Call accelerator.backward(loss), which knows the accumulation window and the loss scale."
)
FOREIGN_GRADIENTS = (
    "the model has gradients that are not from accelerator.backward(loss): loss.backward() has computed them, or the "
    "script has set a parameter's grad.\nCall accelerator.backward(loss), which knows the accumulation window and the "
    "loss scale, and change gradients between it and optimizer.step(). optimizer.zero_grad() before it drops others."
)
OWN_GRADIENTS = (
    "the script has changed or set a parameter's grad, and optimizer.step() would not apply it: ZeRO applies its own "
    "partitions of the gradients that backward() has computed.\nClip with accelerator.clip_grad_norm_(). Change "
    "gradients during the backward, with p.register_hook(lambda gradient: …) before the forward. DDP, one device, "
    "stage 0, and stage 1 in fp32 apply a p.grad that is set between backward() and step() or clip_grad_norm_()."
)
LOSS_OF_OTHERS = (
    "the loss of this backward() depends on no trained parameter of the prepared model, but was multiplied by its loss "
    "scale.\nCall loss.backward() for models that are not prepared."
)


class Saving(NamedTuple):
    """A change of the configuration that needs less device memory.

    Attributes:
        text: what to write into the configuration.
        changes: the fields of a plan's `Setup` that it changes.
    """

    text: str
    changes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """The arguments of `Strategy.build_session`.

    Attributes:
        model: the user's module.
        optimizer: the user's optimizer or placeholder; None for a model that is not trained.
        resolved: the resolved configuration.
        schedulers: the learning-rate schedulers that were built on `optimizer`. A strategy that replaces the optimizer
            object attaches them to the new one.
        is_placed: whether the model is moved to this process's device.
        only_evaluates: whether the model is never trained; otherwise its optimizer may be prepared later.
    """

    model: nn.Module
    optimizer: Optimizer | DummyOptim | None
    resolved: Resolved
    schedulers: tuple[Any, ...]
    is_placed: bool = True
    only_evaluates: bool = False


class Session(ABC):
    """One model with its optimizer, ready to train.

    A `Window` decides *when* gradients are reduced, rescaled, clipped, applied and dropped, and calls a session in the
    legal order; a session decides *how*, and does not know where in its window the loop is.

    Attributes:
        model: the prepared model, which the loop calls.
        module: the user's own module inside it.
        optimizer: the torch optimizer that runs; None for a model that is not trained.
        last_norm: the norm of the last step's gradients before clipping, if it was computed.
        unpartitioned_gradients: whether `p.grad` of the user's own parameters holds the complete gradient of the step,
            as in plain torch; False where gradients are partitioned.
        unpartitioned_states: whether the optimizer's `state` has the user's own parameters as keys, as in plain torch.
        states_are: where the optimizer states are, if `state_dict` does not contain them; "" if it does.
        left_out: parameters that require gradients and are in no group of the optimizer.
        given: the script's optimizer, which may be another object than `optimizer`.
        partitioned: parameters that no other optimizer may step.
        own_step_hooks: the number of step hooks of `optimizer` that guards have registered.
        step_hooks: the hooks before and after a step that the script registered on its optimizer, if the optimizer that
            runs does not call them once for each step.
        scales_loss: whether losses are multiplied by `loss_scale`.
        adds_to_complete_gradients: whether a backward may add to gradients that are complete, which it does not scale.
        events: the lists of calls to which guards have subscribed. A session that emits an event calls them in order.
        is_in_backward: whether a backward of this session runs.
        is_stepping: whether its optimizer runs.
        on_failure: called if a gradient was computed outside of the window's backward, so that it must not be applied.
        states_stay: whether optimizer states and fp32 master weights stay in memory, unchanged, between two steps.
        leaves_files: whether `close` has files to remove, and is collective.
        before_change: called before optimizer states or fp32 master weights change; set while they are being copied.
        copies: the trained weights of which each process has a copy of its own, that must not differ at a step.
        script_tensors: tensors besides the weights that the script trains, and that losses depend on.
        undo: what `close` calls: each takes back a change of the user's module.
    """

    unpartitioned_gradients = True
    unpartitioned_states = True
    states_are = ""
    states_stay = True
    leaves_files = False
    before_change: Callable[[], None] | None = None
    on_failure: Callable[[], None] | None = None
    copies: Sequence[nn.Parameter] = ()
    script_tensors: Collection[Tensor] = ()
    is_in_backward = False
    is_stepping = False
    scales_loss = False
    adds_to_complete_gradients = False
    left_out: Sequence[nn.Parameter] = ()
    step_hooks: tuple[Mapping[int, Any], Mapping[int, Any]] = ({}, {})

    model: nn.Module
    module: nn.Module
    optimizer: Optimizer | None
    given: Optimizer | None = None
    partitioned: Sequence[nn.Parameter] = ()
    own_step_hooks = 0
    events: Events
    undo: list[Callable[[], Any]]
    last_norm: Tensor | float | None = None
    _scale: LossScale | None = None  # under fp16

    @functools.cached_property
    def most_skips(self) -> int:
        """The number of skipped steps in a row after which the run stops."""
        return DEFAULT_MOST_SKIPS if self._scale is None else self._scale.most_skips

    @property
    def loss_scale(self) -> float:
        """The factor on the loss under fp16; 1.0 otherwise."""
        return 1.0 if self._scale is None else self._scale.value

    def raise_clearer(self, error: BaseException) -> None:  # noqa: B027
        """Raise a clearer error instead of one in a backward or a step; return if there is none."""

    @abstractmethod
    def open_backward(self, loss: Tensor, *, ends_window: bool, is_first: bool) -> None:
        """Called before a backward that may reach this model; `close_backward` or `abandon_backward` follows.

        Not called for a model that is not trained.

        Args:
            loss: the loss.
            ends_window: whether it is the last backward before `step`, if it reaches this model.
            is_first: whether the gradients begin with it.
        """

    @abstractmethod
    def has_reached(self, loss: Tensor, *, is_first: bool) -> bool:
        """Whether the backward of `loss`, which depends on no other trained model, has computed gradients."""

    @abstractmethod
    def close_backward(self, *, reached: bool) -> None:
        """Called after the backward. Collective if `reached` and gradients are partitioned.

        Args:
            reached: whether the backward computed gradients of this model.

        Raises:
            LoopError: the gradients could not be reduced.
        """

    @abstractmethod
    def abandon_backward(self, *, reached: bool) -> bool:
        """Called if the backward raised.

        Args:
            reached: whether it may have computed gradients of this model.

        Returns:
            Whether it has left gradients, or may have.
        """

    @abstractmethod
    def emit_from_hooks(self) -> None:
        """Register the hooks that emit events inside of a backward or a forward, if a guard has subscribed to these."""

    def may_compute_gradients(self) -> bool:
        """Whether gradients may be computed now: in a backward of this session, or as the strategy allows."""
        return self.is_in_backward

    def drop_applied(self) -> bool | None:
        """Drop the gradients of the last step; whether there were any, or None if the step itself has cleared them."""
        return None

    @abstractmethod
    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss times `loss_scale`."""

    @abstractmethod
    def set_loss_scale(self, scale: float, *, accumulated: bool, complete: bool) -> None:
        """Change the loss scale, and rescale the gradients that have it.

        Args:
            scale: the new loss scale.
            accumulated: whether there are accumulated gradients.
            complete: whether there are complete ones.
        """

    def copies_to_save(self) -> Sequence[nn.Parameter]:
        """Return the trained weights of which each process saves a part of its own copy."""
        return self.copies

    def take_written(self) -> dict[int, bool] | None:
        """The steps since the last call before which the script has written weights; None where this is not known.

        Each with whether that has changed this process's partition, from which the other processes' copies are renewed.
        """
        return None

    def follow_window(self, ends_window: Callable[[], bool]) -> None:  # noqa: B027 - only DDP needs to know before
        """Before each forward, ask `ends_window` whether its backward is the last one of the window."""

    def follow_zero_grad(self, zero_grad: Callable[[], None]) -> None:
        """Make `zero_grad()` of the model call `zero_grad`, that of its optimizer."""
        route(self.model, "zero_grad", lambda set_to_none=True: zero_grad())  # noqa: ARG005 - as torch's

    @abstractmethod
    def scale_gradients(self, factor: float) -> None:
        """Multiply the accumulated gradients by `factor`."""

    @abstractmethod
    def complete_gradients(self) -> Measured:
        """Make the accumulated gradients those of the step: averaged, and divided by the loss scale. Collective.

        Once in a window, before `clip`, `first_nonfinite` and `step`.

        Raises:
            LoopError: the script has changed something that the step would not apply.
        """

    @abstractmethod
    def clip(self, max_norm: float, *, norm_type: float, only: list[Tensor] | None, measured: Measured) -> Measured:
        """Clip the complete gradients by their norm. Collective.

        Args:
            max_norm: the largest norm; `inf` only measures.
            norm_type: the order of the norm.
            only: the parameters to clip; None for all of the optimizer.
            measured: what is known of the gradients.

        Returns:
            What is known of them now, with their norm before clipping.

        Raises:
            LoopError: `norm_type` or `only` is not supported where gradients are partitioned.
        """

    @abstractmethod
    def step(self, measured: Measured, *, max_norm: float) -> bool | FoundInf:
        """Apply the complete gradients. Collective.

        Args:
            measured: what is known of them.
            max_norm: the norm at which the step is still to clip them; `inf` for none.

        Returns:
            False if the step was skipped, since they are not finite; or what says so, where the device has decided.

        Raises:
            LoopError: the script has changed something that the step would not apply.
        """

    def step_without_backward(self, *, is_again: bool) -> None:
        """Take a step without a backward, which applies nothing, as a torch optimizer whose gradients are all None.

        Args:
            is_again: whether the gradients of the last step may still be there.
        """
        for check in self.events.nothing_to_step:
            check(is_again=is_again)

    @abstractmethod
    def first_nonfinite(self) -> str | None:
        """The name of the first parameter whose complete gradient is not finite, or None. Collective."""

    def agree_to_drop(self) -> None:  # noqa: B027 - only where the processes have to wait for each other
        """Called before the gradients of a window that has ended are dropped in place of `complete_gradients`.

        Collective where gradients are partitioned.

        Raises:
            LoopError: on every process, if others complete them.
        """

    @abstractmethod
    def drop_gradients(self, *, failed: bool) -> None:
        """Drop all gradients.

        Args:
            failed: whether a backward or a step has failed, which may be unfinished.
        """

    def drop_foreign_gradients(self, *, in_window: bool) -> None:  # noqa: B027 - an engine's step refuses them
        """Drop gradients that this session did not compute, or has applied, as `zero_grad` before a backward does.

        Args:
            in_window: whether the accumulation window does not end at this micro-batch.
        """

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, backwards do not average gradients, where the strategy supports that."""
        return nullcontext()

    def named_tensors(self, only: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """The unpartitioned weights and buffers by name, one at a time, on every rank; collective.

        Args:
            only: the names of the tensors to yield, the same on all ranks; None for all.
        """
        for name, tensor in persistent_tensors(self.module, only):
            yield name, tensor.detach()

    def weight_fragments(self) -> Iterator[Fragment]:
        """This process's fragments of the parameters and buffers, of kind `weight`. Not collective.

        Raises:
            CheckpointError: they are not accessible by parameter name.
        """
        rank, world_size = process_index(), num_processes()
        for name, tensor in persistent_tensors(self.module):
            yield unpartitioned_fragment(name, tensor, rank, world_size)

    def optimized_pieces(self) -> list[OptimizedPiece]:
        """The pieces of the trained parameters in the tensors that the optimizer steps; empty without an optimizer.

        Raises:
            CheckpointError: as for `weight_fragments`.
        """
        if self.optimizer is None:
            return []
        return unpartitioned_pieces(self.optimizer, self.module, process_index(), num_processes())

    def blocks(self, *, changing: bool) -> Iterator[list[OptimizedPiece]]:  # noqa: ARG002
        """The `optimized_pieces` in blocks; each block is in memory until the next one is requested.

        Args:
            changing: whether the values will be changed, inside `reading`; otherwise they are only read.
        """
        yield self.optimized_pieces()

    def fetched(self, fragments: Iterable[Fragment], *, changing: bool) -> Iterator[Fragment]:  # noqa: ARG002
        """Load fragments of weights that are not trained; each is in memory until the next one is requested.

        Args:
            fragments: the fragments, from `weight_fragments`.
            changing: as in `blocks`.
        """
        yield from fragments

    def loading(self) -> AbstractContextManager[None]:
        """Inside, weights, fp32 master weights and optimizer states are overwritten in their fragments; collective."""
        return nullcontext()

    def update_master_weights(self) -> None:  # noqa: B027 - by default the weights themselves are stepped
        """Copy the module's weights, which were changed, to the fp32 master weights."""

    def whole_weights(self) -> AbstractContextManager[None]:
        """Inside, the weights are unpartitioned on every process, and what is written to them is kept. Collective."""
        return nullcontext()

    def showing_weights(self, weights: Mapping[str, Tensor]) -> AbstractContextManager[None]:  # noqa: ARG002
        """Inside, `state_dict` of the user's module has these unpartitioned weights in place of partitions.

        Args:
            weights: by name; empty where this process has none, and `state_dict` stays an error.
        """
        return nullcontext()

    def loading_state_dicts(self) -> AbstractContextManager[None]:
        """Inside, `load_state_dict` of the user's module works, called on all processes. Collective.

        `update_master_weights` is to follow.
        """
        return nullcontext()

    def scale_state(self) -> dict[str, float]:
        """The state of the loss scale, see `LossScale.state`; empty if there is none."""
        return {} if self._scale is None else self._scale.state()

    def restore_scale(self, state: Mapping[str, float]) -> None:
        """Restore a `scale_state`, if this session has a dynamic loss scale."""
        if self._scale is not None and state:
            self._scale.restore(state)

    def reduction_state(self) -> list[list[str]]:
        """The names of the parameters in each bucket of gradients; empty if the buckets are the same in every run.

        The position in a bucket changes how a sum is rounded, so a run that resumes bitwise needs the same buckets.
        """
        return []

    def restore_reduction(self, state: list[list[str]]) -> None:  # noqa: B027 - by default buckets never change
        """Sum gradients in the buckets of a `reduction_state`. Collective."""

    @abstractmethod
    def close(self) -> None:
        """Release hooks, engines and communication; the session cannot be used afterwards."""


class Strategy(ABC):
    """Builds sessions for one kind of distributed training.

    Attributes:
        distributed_type: its name in Accelerate.
        handlers: the script's arguments of torch's own objects; see `accept`.
        checks: which mistakes of a script the guards look for.
        optimizer_may_follow: whether a model that was prepared without its optimizer can get it later, by
            `add_optimizer`; until then its gradients are averaged over the processes, or a backward raises.
        reads_engine_keys: whether it reads all keys of DeepSpeed's engine.
    """

    name: StrategyName
    distributed_type: DistributedType
    handlers = Handlers()
    checks: Checks = "all"
    optimizer_may_follow = False
    reads_engine_keys = False

    @abstractmethod
    def build_session(self, request: SessionRequest, processes: Processes) -> Session:
        """Build the session of `request`."""

    def add_optimizer(self, session: Session, request: SessionRequest) -> None:  # noqa: ARG002
        """Add the request's optimizer to a session that was built without one.

        Raises:
            LoopError: the strategy does not support this, or not for this model.
        """
        raise LoopError(
            f"prepare() got the optimizer of the {type(request.model).__name__} in a later call than the model; under "
            "ZeRO both are partitioned together.\nPass them in one call: model, optimizer = prepare(model, optimizer)."
        )

    def hold_optimizer(self, optimizer: Optimizer) -> UnpreparedOptimizer:
        """A replacement for the session of an optimizer whose model is not prepared yet."""
        return UnpreparedOptimizer(optimizer, steps=False)

    def reduce_next_backward(self, session: Session) -> AbstractContextManager[None]:  # noqa: ARG002
        """Inside, the next backward averages gradients, even if its forward ran inside `no_sync`."""
        return nullcontext()

    def join(self, joinables: list[Any], *, enable: bool) -> AbstractContextManager[Any] | None:  # noqa: ARG002
        """Torch's `Join` context, in which processes with fewer batches join the others' collectives; None without DDP.

        Args:
            joinables: the DDP models.
            enable: if False, the context does nothing.
        """
        return None

    def accept(self, handlers: Handlers) -> list[str]:
        """Set the script's arguments of torch's own objects, for the sessions that are built afterwards.

        Returns:
            Lines about arguments that have no effect with this strategy.

        Raises:
            ConfigError: this strategy cannot honour an argument.
        """
        self.handlers = handlers
        return []

    def autocast(self, precision: str, handler: AutocastKwargs | None) -> AbstractContextManager[Any]:  # noqa: ARG002
        """The autocast context in which the forwards of prepared models run.

        Args:
            precision: `no`, `fp16` or `bf16`.
            handler: arguments of `torch.autocast`.
        """
        return nullcontext()

    def init_model(self) -> AbstractContextManager[None]:
        """Inside, models are constructed partitioned, if the strategy partitions parameters."""
        return nullcontext()

    def allocate(self, module: nn.Module, device: torch.device) -> None:
        """Allocate uninitialized memory for the parts of meta tensors that this process keeps. Collective.

        Args:
            module: a module that is not prepared yet.
            device: the device of its tensors; that of partitioned parameters depends on the configuration.

        Raises:
            CheckpointError: its partitions cannot be loaded from files.
        """
        allocate_unpartitioned(module, device)

    def fragments_to_fill(self, module: nn.Module, names: Collection[str]) -> Iterator[Fragment]:
        """This process's fragments of some parameters and buffers of a module that is not prepared.

        Each fragment must be overwritten completely before the next one is requested.
        """
        for name, tensor in persistent_tensors(module, names):
            yield unpartitioned_fragment(name, tensor, 0, 1)

    def gathered_tensors(self, tensors: Iterable[Tensor]) -> AbstractContextManager[None]:  # noqa: ARG002
        """Inside, tensors of a module that is not prepared are unpartitioned; rank 0's changes are kept. Collective."""
        return nullcontext()

    def whole_weights(self, module: nn.Module) -> AbstractContextManager[None]:  # noqa: ARG002
        """See `Session.whole_weights`, of a module that is not prepared: below stage 3 it holds all its weights."""
        return nullcontext()

    @property
    def partitions_parameters(self) -> bool:
        """Whether parameters are partitioned over the processes."""
        return False

    def zero_stage(self, resolved: Resolved) -> Literal[0, 1, 2, 3] | None:  # noqa: ARG002
        """The ZeRO stage of a configuration under this strategy; None if it runs without ZeRO."""
        return None

    def remove_leftover_files(self, resolved: Resolved, processes: Processes) -> None:  # noqa: ARG002
        """Remove files of killed runs from the folders in which this run will write."""
        return

    def savings(self, resolved: Resolved) -> tuple[Saving, ...]:  # noqa: ARG002
        """Changes of the configuration that need less device memory, the cheapest first.

        Args:
            resolved: the current configuration.
        """
        return (
            Saving("ZeRO, which partitions gradients and optimizer states: zero_stage: 2", {"stage": 2}),
            Saving("zero_stage: 3, which partitions parameters too", {"stage": 3}),
            Saving(
                "zero_stage: 2 with offload_optimizer_device: cpu, which keeps optimizer states in CPU memory",
                {"stage": 2, "offload_optimizer": "cpu"},
            ),
        )

    def forget_dropped(self) -> None:  # noqa: B027 - most keep nothing
        """Release what libraries keep of the models of an `Accelerator` that was garbage-collected. Not collective."""

    def destroy_process_group(self) -> None:
        """Destroy the process group, and references to it."""
        if dist.is_initialized():  # else another strategy has destroyed it
            dist.destroy_process_group()

    def load_pretrained(self, partitioned: bool | None = None) -> AbstractContextManager[None]:  # noqa: ARG002
        """`init_model` for transformers' `from_pretrained`; entered for the duration of the run.

        Args:
            partitioned: whether models are constructed partitioned; None as configured.
        """
        return nullcontext()


_CHECKPOINTED = (
    "a layer runs in two checkpoints of the older kind (use_reentrant=True): write checkpoint(layer, x, "
    "use_reentrant=False), or for a model of transformers gradient_checkpointing_enable("
    '{"use_reentrant": False})'
)
_NESTED = (
    "a hook of the loss runs a forward and a backward for each mini-batch (GradCache, Cached…Loss of "
    "sentence-transformers): call accelerator.backward((model(part) * gradient).sum()) for each of them in the loop, "
    "outside of a hook, before one optimizer.step()"
)


class SecondGradientError(LoopError):
    """A parameter got two gradients in one backward; the session, which knows the loss, explains it."""


def describe_second_gradient(why: str, *, is_nested: bool = False) -> str:
    """The message where a parameter gets two gradients in one backward, which cannot be averaged over processes.

    Args:
        why: what would be wrong.
        is_nested: whether further backwards inside of this one are the likely cause.
    """
    causes = (_NESTED, _CHECKPOINTED) if is_nested else (_CHECKPOINTED, _NESTED)
    return (
        f"a parameter got two gradients in one backward. {why}.\nEither {causes[0]}.\nOr {causes[1]}.\n"
        "Or train at ZeRO stage 0 or 1."
    )


def describe_renormalizing(model: nn.Module) -> str | None:
    """Name the first embedding whose forward writes into its weights, and their number; None if there is none."""
    names = [
        f"{name or 'root'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        and module.max_norm is not None
        and module.weight.requires_grad
    ]
    if not names:
        return None
    return f"the forward of {len(names)} embeddings with max_norm writes into their weights, e.g. that of {names[0]}"


def release_failed_backward() -> None:
    """Free what torch still holds of a backward of this thread that raised.

    The operations of its graph that were ready to run stay in a queue of torch's in C++, and with them the graph, its
    hooks and the modules that these refer to: an engine too. The thread's next backward discards them; torch has no
    other function for that.
    """
    with torch.inference_mode(False), torch.enable_grad():
        torch.autograd.backward(torch.zeros((), device="cpu", requires_grad=True))


def route(model: nn.Module, name: str, call: Callable[..., Any]) -> None:
    """Replace a method of a model by `call`; in a deep copy of the model it is that of its class."""
    own = getattr(type(model), name)

    @functools.wraps(own)
    def routed(this: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs) if this is model else own(this, *args, **kwargs)

    setattr(model, name, MethodType(routed, model))
