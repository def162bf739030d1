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
        text: the lines to write into the configuration.
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
        given: the script's optimizer. `optimizer` may be another object.
        partitioned: parameters that no other optimizer may step.
        own_step_hooks: the number of step hooks of `optimizer` that guards have registered.
        step_hooks: the script's hooks before and after a step, if the running optimizer does not call them exactly once
            for each step.
        scales_loss: whether losses are multiplied by `loss_scale`.
        adds_to_complete_gradients: whether a backward may add to complete gradients. The session does not scale these.
        events: the lists of calls to which guards have subscribed. A session that emits an event calls them in order.
        is_in_backward: whether a backward of this session is running.
        is_stepping: whether the session's optimizer is running.
        on_failure: called if a gradient was computed outside of the window's backward, so no gradient may be applied.
        states_stay: whether optimizer states and fp32 master weights stay in memory, unchanged, between two steps.
        leaves_files: whether `close` has files to remove, and is collective.
        before_change: called before optimizer states or fp32 master weights change; set while a save is copying them.
        copies: the trained weights that each process holds as its own copy; the copies must be equal at every step.
        script_tensors: tensors in addition to the weights that the script trains, and that losses depend on.
        undo: functions that `close` calls; each undoes a change of the user's module.
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
        """Raise a clearer error for an error in a backward or a step; return if no clearer one is known."""

    @abstractmethod
    def open_backward(self, loss: Tensor, *, ends_window: bool, is_first: bool) -> None:
        """Prepare a backward that may reach this model; `close_backward` or `abandon_backward` follows.

        Not called for models without an optimizer.

        Args:
            loss: the loss.
            ends_window: whether this is the last backward before `step`, if the backward reaches this model.
            is_first: whether this is the first backward that adds to the gradients.
        """

    @abstractmethod
    def has_reached(self, loss: Tensor, *, is_first: bool) -> bool:
        """Return whether the backward of `loss`, which depends on no other trained model, has computed gradients."""

    @abstractmethod
    def close_backward(self, *, reached: bool) -> None:
        """Finish a backward. Collective if `reached` and gradients are partitioned.

        Args:
            reached: whether the backward computed gradients of this model.

        Raises:
            LoopError: the gradients could not be reduced.
        """

    @abstractmethod
    def abandon_backward(self, *, reached: bool) -> bool:
        """Clean up after a backward that raised.

        Args:
            reached: whether the backward may have computed gradients of this model.

        Returns:
            Whether the backward has left gradients, or may have.
        """

    @abstractmethod
    def emit_from_hooks(self) -> None:
        """Register the hooks that emit events inside a backward or a forward, if a guard has subscribed to them."""

    def may_compute_gradients(self) -> bool:
        """Return whether gradients may be computed now: in a backward of this session, or as the strategy allows."""
        return self.is_in_backward

    def drop_applied(self) -> bool | None:
        """Drop the last step's gradients. Return whether they existed, or None if the step itself has cleared them."""
        return None

    @abstractmethod
    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss times `loss_scale`."""

    @abstractmethod
    def set_loss_scale(self, scale: float, *, accumulated: bool, complete: bool) -> None:
        """Change the loss scale, and rescale the gradients that were computed with the old one.

        Args:
            scale: the new loss scale.
            accumulated: whether accumulated gradients exist.
            complete: whether complete gradients exist.
        """

    def copies_to_save(self) -> Sequence[nn.Parameter]:
        """Return the trained weights that are equal on all processes; each process saves a part of its own copy."""
        return self.copies

    def take_written(self) -> dict[int, bool] | None:
        """Return the steps, since the last call, before which the script has written weights; None if unknown.

        The value of each step is whether the write has changed this process's partition. The other processes renew
        their copies from this partition.
        """
        return None

    def follow_window(self, ends_window: Callable[[], bool]) -> None:  # noqa: B027 - only DDP needs to know before
        """Ask `ends_window` before each forward whether the forward's backward is the last one of the window."""

    def follow_zero_grad(self, zero_grad: Callable[[], None]) -> None:
        """Make the model's `zero_grad()` call `zero_grad`, which belongs to the model's optimizer."""
        route(self.model, "zero_grad", lambda set_to_none=True: zero_grad())  # noqa: ARG005 - as torch's

    @abstractmethod
    def scale_gradients(self, factor: float) -> None:
        """Multiply the accumulated gradients by `factor`."""

    @abstractmethod
    def complete_gradients(self) -> Measured:
        """Turn the accumulated gradients into the step's gradients: average them, divide by the loss scale. Collective.

        Called once in a window, before `clip`, `first_nonfinite` and `step`.

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
            measured: known facts about the gradients.

        Returns:
            The facts after clipping, with the norm before clipping.

        Raises:
            LoopError: `norm_type` or `only` is not supported where gradients are partitioned.
        """

    @abstractmethod
    def step(self, measured: Measured, *, max_norm: float) -> bool | FoundInf:
        """Apply the complete gradients. Collective.

        Args:
            measured: known facts about the gradients.
            max_norm: the norm at which the step must still clip the gradients; `inf` for none.

        Returns:
            False if the step was skipped because gradients are not finite; a `FoundInf` if the device has decided.

        Raises:
            LoopError: the script has changed something that the step would not apply.
        """

    def step_without_backward(self, *, is_again: bool) -> None:
        """Take a step without a backward. It applies nothing, like a torch optimizer whose gradients are all None.

        Args:
            is_again: whether the gradients of the last step may still exist.
        """
        for check in self.events.nothing_to_step:
            check(is_again=is_again)

    @abstractmethod
    def first_nonfinite(self) -> str | None:
        """Return the name of the first parameter whose complete gradient is not finite, or None. Collective."""

    def agree_to_drop(self) -> None:  # noqa: B027 - only where the processes have to wait for each other
        """Let the processes agree that they drop the gradients of an ended window instead of completing them.

        Collective if gradients are partitioned.

        Raises:
            LoopError: on every process, if other processes complete the gradients.
        """

    @abstractmethod
    def drop_gradients(self, *, failed: bool) -> None:
        """Drop all gradients.

        Args:
            failed: whether a backward or a step has failed and may be unfinished.
        """

    def drop_foreign_gradients(self, *, in_window: bool) -> None:  # noqa: B027 - an engine's step refuses them
        """Drop gradients that this session did not compute or has already applied, as `zero_grad` before a backward.

        Args:
            in_window: whether the accumulation window does not end at this micro-batch.
        """

    def no_sync(self) -> AbstractContextManager[None]:
        """Skip averaging gradients in backwards inside this context, if the strategy supports that."""
        return nullcontext()

    def named_tensors(self, only: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the unpartitioned weights and buffers by name, one at a time, on every rank; collective.

        Args:
            only: the names of the tensors to yield, the same on all ranks; None for all.
        """
        for name, tensor in persistent_tensors(self.module, only):
            yield name, tensor.detach()

    def weight_fragments(self) -> Iterator[Fragment]:
        """Iterate over this process's fragments of the parameters and buffers, of kind `weight`. Not collective.

        Raises:
            CheckpointError: the weights are not accessible by parameter name.
        """
        rank, world_size = process_index(), num_processes()
        for name, tensor in persistent_tensors(self.module):
            yield unpartitioned_fragment(name, tensor, rank, world_size)

    def optimized_pieces(self) -> list[OptimizedPiece]:
        """List the trained parameters' pieces in the tensors that the optimizer steps; empty without an optimizer.

        Raises:
            CheckpointError: as for `weight_fragments`.
        """
        if self.optimizer is None:
            return []
        return unpartitioned_pieces(self.optimizer, self.module, process_index(), num_processes())

    def blocks(self, *, changing: bool) -> Iterator[list[OptimizedPiece]]:  # noqa: ARG002
        """Iterate over the `optimized_pieces` in blocks; each block is in memory until the next one is requested.

        Args:
            changing: whether the caller changes the values, inside `loading`. False: the caller only reads them.
        """
        yield self.optimized_pieces()

    def fetched(self, fragments: Iterable[Fragment], *, changing: bool) -> Iterator[Fragment]:  # noqa: ARG002
        """Load fragments of untrained weights; each is in memory until the next one is requested.

        Args:
            fragments: the fragments, from `weight_fragments`.
            changing: as in `blocks`.
        """
        yield from fragments

    def loading(self) -> AbstractContextManager[None]:
        """Allow overwriting weights, fp32 master weights and optimizer states in their fragments. Collective."""
        return nullcontext()

    def update_master_weights(self) -> None:  # noqa: B027 - by default the weights themselves are stepped
        """Copy the module's changed weights to the fp32 master weights."""

    def whole_weights(self) -> AbstractContextManager[None]:
        """Gather the weights on every process inside this context, and keep what is written to them. Collective."""
        return nullcontext()

    def showing_weights(self, weights: Mapping[str, Tensor]) -> AbstractContextManager[None]:  # noqa: ARG002
        """Make `state_dict` of the user's module return these unpartitioned weights instead of partitions.

        Args:
            weights: the weights by name. If this process has none, `state_dict` stays an error.
        """
        return nullcontext()

    def loading_state_dicts(self) -> AbstractContextManager[None]:
        """Allow `load_state_dict` of the user's module on all processes. Collective.

        The caller must call `update_master_weights` afterwards.
        """
        return nullcontext()

    def scale_state(self) -> dict[str, float]:
        """Return the state of the loss scale, see `LossScale.state`; empty without a loss scale."""
        return {} if self._scale is None else self._scale.state()

    def restore_scale(self, state: Mapping[str, float]) -> None:
        """Restore a `scale_state`, if this session has a dynamic loss scale."""
        if self._scale is not None and state:
            self._scale.restore(state)

    def reduction_state(self) -> list[list[str]]:
        """Return the names of the parameters in each bucket of gradients; empty if the buckets are equal in every run.

        The position in a bucket changes how a sum is rounded, so a bitwise resume needs the same buckets.
        """
        return []

    def restore_reduction(self, state: list[list[str]]) -> None:  # noqa: B027 - by default buckets never change
        """Use the buckets of a `reduction_state`. Collective."""

    @abstractmethod
    def close(self) -> None:
        """Release hooks, engines and communication. The session cannot be used afterwards."""


class Strategy(ABC):
    """A kind of distributed training; it builds sessions.

    Attributes:
        distributed_type: the name of this kind in Accelerate.
        handlers: the script's arguments for torch's own objects; see `accept`.
        checks: the setting for how often guards look for a script's mistakes.
        optimizer_may_follow: whether `add_optimizer` can add the optimizer to a model that was prepared without one.
            Until then the strategy averages the model's gradients over the processes, or a backward raises.
        reads_engine_keys: whether the strategy reads all keys of DeepSpeed's engine.
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
        """Return a replacement for the session of an optimizer whose model is not prepared yet."""
        return UnpreparedOptimizer(optimizer, steps=False)

    def reduce_next_backward(self, session: Session) -> AbstractContextManager[None]:  # noqa: ARG002
        """Average gradients in the next backward inside this context, even if its forward ran inside `no_sync`."""
        return nullcontext()

    def join(self, joinables: list[Any], *, enable: bool) -> AbstractContextManager[Any] | None:  # noqa: ARG002
        """Return torch's `Join` context, in which processes with fewer batches join collectives; None without DDP.

        Args:
            joinables: the DDP models.
            enable: if False, the context does nothing.
        """
        return None

    def accept(self, handlers: Handlers) -> list[str]:
        """Set the script's arguments for torch's own objects, for the sessions that are built afterwards.

        Returns:
            Lines about arguments that have no effect with this strategy.

        Raises:
            ConfigError: this strategy cannot honour an argument.
        """
        self.handlers = handlers
        return []

    def autocast(self, precision: str, handler: AutocastKwargs | None) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Return the autocast context in which the forwards of prepared models run.

        Args:
            precision: `no`, `fp16` or `bf16`.
            handler: arguments of `torch.autocast`.
        """
        return nullcontext()

    def init_model(self) -> AbstractContextManager[None]:
        """Construct models partitioned inside this context, if the strategy partitions parameters."""
        return nullcontext()

    def allocate(self, module: nn.Module, device: torch.device) -> None:
        """Allocate uninitialized memory for the parts of meta tensors that this process keeps. Collective.

        Args:
            module: a module that is not prepared yet.
            device: the device of the module's tensors. The configuration sets the device of partitioned parameters.

        Raises:
            CheckpointError: the module's partitions cannot be loaded from files.
        """
        allocate_unpartitioned(module, device)

    def fragments_to_fill(self, module: nn.Module, names: Collection[str]) -> Iterator[Fragment]:
        """Iterate over this process's fragments of some parameters and buffers of a module that is not prepared.

        The caller must overwrite each fragment completely before it requests the next one.
        """
        for name, tensor in persistent_tensors(module, names):
            yield unpartitioned_fragment(name, tensor, 0, 1)

    def gathered_tensors(self, tensors: Iterable[Tensor]) -> AbstractContextManager[None]:  # noqa: ARG002
        """Gather tensors of a module that is not prepared; rank 0's changes are kept. Collective."""
        return nullcontext()

    def whole_weights(self, module: nn.Module) -> AbstractContextManager[None]:  # noqa: ARG002
        """Gather the weights of a module that is not prepared. Below stage 3 every process holds them already."""
        return nullcontext()

    @property
    def partitions_parameters(self) -> bool:
        """Whether parameters are partitioned over the processes."""
        return False

    def zero_stage(self, resolved: Resolved) -> Literal[0, 1, 2, 3] | None:  # noqa: ARG002
        """Return the ZeRO stage of a configuration under this strategy; None without ZeRO."""
        return None

    def remove_leftover_files(self, resolved: Resolved, processes: Processes) -> None:  # noqa: ARG002
        """Remove the files of killed runs from the folders where this run will write."""
        return

    def savings(self, resolved: Resolved) -> tuple[Saving, ...]:  # noqa: ARG002
        """Return changes of the configuration that need less device memory, the cheapest first.

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

    def forget_dropped(self) -> None:  # noqa: B027 - most strategies keep nothing
        """Release the state that libraries keep of a garbage-collected `Accelerator`'s models. Not collective."""

    def destroy_process_group(self) -> None:
        """Destroy the process group and the references to it."""
        if dist.is_initialized():  # False if another strategy has destroyed the group
            dist.destroy_process_group()

    def load_pretrained(self, partitioned: bool | None = None) -> AbstractContextManager[None]:  # noqa: ARG002
        """Return `init_model` for transformers' `from_pretrained`; the context is active for the whole run.

        Args:
            partitioned: whether models are constructed partitioned. None: as configured.
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
    """An error for two gradients of a parameter in one backward. The session, which knows the loss, explains it."""


def describe_second_gradient(why: str, *, is_nested: bool = False) -> str:
    """Return the message for a parameter with two gradients in one backward, which this strategy cannot average.

    Args:
        why: the consequence.
        is_nested: whether backwards nested inside this one are the likely cause.
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
    """Free the memory that torch still holds of this thread's failed backward.

    Operations that were ready to run stay in a queue in torch's C++ code. The queue keeps the graph alive, and with it
    hooks, modules and possibly an engine. The thread's next backward empties the queue; torch has no other function
    for that.
    """
    with torch.inference_mode(False), torch.enable_grad():
        torch.autograd.backward(torch.zeros((), device="cpu", requires_grad=True))


def route(model: nn.Module, name: str, call: Callable[..., Any]) -> None:
    """Replace a method of a model by `call`. A deep copy of the model calls its class's method."""
    own = getattr(type(model), name)

    @functools.wraps(own)
    def routed(this: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs) if this is model else own(this, *args, **kwargs)

    setattr(model, name, MethodType(routed, model))
