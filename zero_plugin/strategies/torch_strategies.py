"""The strategies of plain PyTorch: one device, and DistributedDataParallel."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.optim import Optimizer

from zero_plugin.config.handlers import AutocastKwargs, DistributedDataParallelKwargs
from zero_plugin.config.placeholders import DummyOptim
from zero_plugin.config.resolve.facts import OptimizerSection, Resolved, StrategyName
from zero_plugin.distributed.collectives import announce
from zero_plugin.distributed.processes import Processes
from zero_plugin.errors import ConfigError, LoopError, Problem
from zero_plugin.strategies.base import Saving, Session, SessionRequest, Strategy, describe_renormalizing
from zero_plugin.strategies.events import Guard, subscribe
from zero_plugin.strategies.experts import find_expert_layers, reach_every_expert
from zero_plugin.strategies.guards.differing_steps import DifferingSteps
from zero_plugin.strategies.guards.foreign_backward import ForeignBackward
from zero_plugin.strategies.guards.foreign_gradients import ForeignGradients
from zero_plugin.strategies.guards.foreign_steps import ForeignSteps
from zero_plugin.strategies.optimizer_only import UnpreparedOptimizer
from zero_plugin.strategies.precision import LossScale, autocast_as
from zero_plugin.strategies.torch_optimizers import build_optimizer
from zero_plugin.strategies.torch_session import Recorder, TorchSession
from zero_plugin.tensors.wrappers import compile_in_place, load_plain

_log = logging.getLogger(__name__)

# The order of calls at an event that several guards share. The collective guard comes last.
GUARDS: Final[tuple[type[Guard], ...]] = (ForeignGradients, ForeignBackward, ForeignSteps, DifferingSteps)


def convert_weights_to_fp32(request: SessionRequest) -> None:
    """Convert trained 16-bit weights to fp32, because 16 bits would round small updates away. Log the conversion.

    ZeRO keeps fp32 master weights for 16-bit weights, or trains in fp32 without mixed precision. Frozen weights keep
    their dtype under mixed precision: autocast converts them.
    """
    if request.optimizer is None:
        return
    halved = [p for p in request.model.parameters() if p.dtype in (torch.bfloat16, torch.float16)]
    trained = [p for p in halved if p.requires_grad]
    if not trained:
        return
    chosen = halved if request.resolved.precision == "no" else trained
    for p in chosen:
        p.data = p.data.float()
        for states, key, value in _states_of(request.optimizer, p):
            if value.dtype in (torch.bfloat16, torch.float16):
                states[key] = value.float()
    _log.info(
        f"{len(chosen)} 16-bit parameters of the {type(request.model).__name__} were converted to fp32 for training, "
        "as under ZeRO; mixed_precision sets the dtype of computation. If a forward casts its own inputs, cast them "
        "to the weights' dtype: x.to(self.layer.weight.dtype)"
    )


def torch_optimizer(request: SessionRequest) -> Optimizer | None:
    """Return the request's optimizer, or build the configured optimizer for a placeholder.

    Move its states to the devices of the parameters, as torch's `load_state_dict` does.
    """
    if not isinstance(request.optimizer, DummyOptim):
        for group in () if request.optimizer is None else request.optimizer.param_groups:
            for p in group["params"]:
                for states, key, value in _states_of(request.optimizer, p):
                    if key != "step" or group.get("capturable") or group.get("fused"):
                        states[key] = value.to(p.device)
        return request.optimizer
    section = request.resolved.optimizer
    assert section is not None, "resolution gives every placeholder a section"
    return build_optimizer(_fused(section, request.model), request.optimizer.params)


def _states_of(optimizer: Optimizer | DummyOptim | None, p: Tensor) -> list[tuple[dict[str, Any], str, Tensor]]:
    """List each tensor state of a parameter, with the dict that contains it and its key."""
    states = getattr(optimizer, "state", {}).get(p, {})  # a wrapper of another library may have none
    return [(states, key, value) for key, value in states.items() if isinstance(value, Tensor)]


def _fused(section: OptimizerSection, model: nn.Module) -> OptimizerSection:
    """Select torch's fused kernel for Adam and AdamW: the same update in one pass, several times faster.

    Change nothing if the section itself selects an implementation. Fused SGD and Adagrad refuse sparse gradients.
    """
    selects = {"fused", "foreach", "capturable", "differentiable"} & section.params.keys()
    is_supported = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in model.parameters())
    if section.type.lower() not in ("adam", "adamw") or selects or not is_supported:
        return section
    return OptimizerSection(section.type, {**section.params, "fused": True})


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's DDP with the inner module's attributes (`model.config`) and state dict, as engines have them."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # `__init__` has not set it yet
                raise
            return getattr(super().__getattr__("module"), name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the inner module's state dict; inside another module's, torch's own, with the names for loading."""
        is_part = kwargs.get("destination") is not None
        return super().state_dict(*args, **kwargs) if is_part else self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load the inner module's state dict."""
        return load_plain(self.module, state_dict, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse pickling: the copy would be wrapped for a process group that does not exist.

        Raises:
            LoopError: always.
        """
        kind = type(self.module).__name__
        raise LoopError(
            f"a prepared {kind} cannot be pickled (torch.save, copy to another process): under DDP it belongs to the "
            f"process group.\nPickle accelerator.unwrap_model(model), which is the {kind} itself; or save its weights "
            "with accelerator.save_model(model, folder)."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))  # type: ignore[no-untyped-call]
        return made


class TorchStrategy(Strategy):
    """A strategy without an engine: the complete model in every process; optimizers may be prepared later.

    Subclass it for a strategy of your own; docs/own-strategy.md has the methods. Example, in which every step uses
    the sign of each gradient:

        class SignSession(TorchSession):
            def step(self, measured, *, max_norm):
                for p in self.module.parameters():
                    if p.grad is not None:
                        p.grad.sign_()
                return super().step(measured, max_norm=max_norm)

        class SignStrategy(TorchStrategy):
            session_class = SignSession

        accelerator = Accelerator(strategy=SignStrategy)

    Attributes:
        session_class: the class of the sessions.
        guards: the guards of the sessions.
    """

    name: StrategyName = "ddp"  # selects the resolution of the configuration: without DeepSpeed's engine
    optimizer_may_follow = True
    session_class: type[TorchSession] = TorchSession
    guards: tuple[type[Guard], ...] = GUARDS

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self.distributed_type = processes.distributed_type

    def build_session(self, request: SessionRequest, processes: Processes) -> Session:
        convert_weights_to_fp32(request)
        module = request.model.to(processes.device) if request.is_placed else request.model
        return self._session(module, request, torch_optimizer(request))

    def autocast(self, precision: str, handler: AutocastKwargs | None) -> AbstractContextManager[Any]:
        return autocast_as(precision, self._processes.device.type, handler)

    def hold_optimizer(self, optimizer: Optimizer) -> UnpreparedOptimizer:
        """Return a replacement that may step only with one process: no average is needed there."""
        return UnpreparedOptimizer(optimizer, steps=self._processes.world_size == 1)

    def add_optimizer(self, session: Session, request: SessionRequest) -> None:
        convert_weights_to_fp32(request)
        optimizer = torch_optimizer(request)
        assert isinstance(session, TorchSession)
        assert optimizer is not None, "the request is for one"
        session.train_with(optimizer)
        subscribe(session, self.guards, self.checks)

    def _session(
        self, model: nn.Module, request: SessionRequest, optimizer: Optimizer | None, recorder: Recorder | None = None
    ) -> TorchSession:
        """Build the session of a request; `model` is the request's model or its wrapper."""
        resolved, scaler = request.resolved, self.handlers.scaler
        if self.handlers.compiles:
            compile_in_place(request.model, self.handlers.compiler)
        scale = None
        if resolved.precision == "fp16":
            factors = () if scaler is None else (scaler.growth_factor, scaler.backoff_factor)
            scale = LossScale(resolved.tree.section("fp16").nested(), *factors)
        session = self.session_class(
            model,
            request.model,
            optimizer,
            precision=resolved.precision,
            scale=scale,
            skips=scale is not None or bool(resolved.tree.value("bf16", "check_grad_overflow", default=True)),
            autocast=self.handlers.autocast,
            recorder=recorder,
            has_own_samples=resolved.facts.machine.shared_by == 1,
        )
        if optimizer is not None:
            subscribe(session, self.guards, self.checks)
        return session


class SingleStrategy(TorchStrategy):
    """Plain torch on one device."""

    name = "single"


class DdpStrategy(TorchStrategy):
    """DistributedDataParallel: an unpartitioned copy of the model in every process."""

    def build_session(self, request: SessionRequest, processes: Processes) -> Session:
        convert_weights_to_fp32(request)
        module = request.model.to(processes.device) if request.is_placed else request.model
        ties = [reach_every_expert(layer, with_gradients=True) for layer in find_expert_layers(module, ())]
        optimizer = torch_optimizer(request)
        trains = not request.only_evaluates and any(p.requires_grad for p in module.parameters())
        if trains and optimizer is None:
            _log.info(
                f"the {type(module).__name__} was prepared without an optimizer: DDP allocates memory for its "
                "gradients. To avoid that, call prepare_model(model, evaluation_mode=True), or freeze the model"
            )
        if trains and (which := describe_renormalizing(module)) is not None:
            announce(
                f"{which}: each process scales the rows that its own batch reads, so the weights differ between the "
                "processes. Build them without max_norm, and scale the rows in the forward."
            )
        model = self._wrap(module, request.is_placed, request.resolved.accumulation) if trains else module
        session = self._session(model, request, optimizer)
        session.undo += ties
        return session

    def _wrap(self, module: nn.Module, is_placed: bool, accumulation: int) -> DistributedDataParallel:
        given = self.handlers.ddp or DistributedDataParallelKwargs()
        if given.static_graph and accumulation > 1:
            where = "DistributedDataParallelKwargs(static_graph=True)"
            message = f"torch does not support it with gradient_accumulation_steps {accumulation}"
            raise ConfigError([Problem(where, "", message, "Leave it out, or write gradient_accumulation_steps 1.")])
        # DDP sends a single buffer as a flat view. torch refuses to copy this view back if a dimension of one element
        # has an unusual stride, as in `positions.unsqueeze(0).transpose(0, 1)`. So give buffers standard strides.
        for buffer in module.buffers():
            if 1 in buffer.shape and buffer.is_contiguous():
                buffer.data = buffer.data.view(-1).view(buffer.shape)
        ddp = DistributedDataParallel(
            module,
            device_ids=[self._processes.device] if is_placed and self._processes.device.type == "cuda" else None,
            **given.to_kwargs(),
        )
        given.register_comm_hook(ddp)
        return ddp

    def savings(self, resolved: Resolved) -> tuple[Saving, ...]:
        """Return savings; the first one makes gradients views of DDP's buckets."""
        if (self.handlers.ddp or DistributedDataParallelKwargs()).gradient_as_bucket_view:
            return super().savings(resolved)
        text = (
            "gradients that are views of DDP's buckets: Accelerator(kwargs_handlers=[DistributedDataParallelKwargs("
            "gradient_as_bucket_view=True)]), unless the script uses gradients after zero_grad()"
        )
        return (Saving(text, {"gradient_views": True}), *super().savings(resolved))

    def add_optimizer(self, session: Session, request: SessionRequest) -> None:
        """Add the optimizer, as in `Strategy.add_optimizer`.

        Raises:
            LoopError: the weights are in 16 bits, or the model was prepared for evaluation.
        """
        if any(p.requires_grad and p.dtype in (torch.bfloat16, torch.float16) for p in request.model.parameters()):
            raise LoopError(
                f"prepare() got the optimizer of the {type(request.model).__name__} in a later call than the model, "
                "whose weights are in 16 bits: they must be converted to fp32 before DDP wraps the model.\n"
                "Pass them in one call: model, optimizer = prepare(model, optimizer)."
            )
        if any(p.requires_grad for p in request.model.parameters()) and session.model is session.module:
            raise LoopError(
                f"prepare() got the optimizer of the {type(request.model).__name__} in a later call than the model, "
                "which was prepared frozen or for evaluation only.\nPass them in one call."
            )
        super().add_optimizer(session, request)

    @contextmanager
    def reduce_next_backward(self, session: Session) -> Iterator[None]:
        ddp = session.model
        if not isinstance(ddp, DistributedDataParallel):
            yield
            return
        before = ddp.require_backward_grad_sync
        ddp.require_backward_grad_sync = True
        ddp.reducer._rebuild_buckets()
        ddp.reducer.prepare_for_backward([])  # DDP does this in a forward, but not inside `no_sync`
        try:
            yield
        finally:
            ddp.require_backward_grad_sync = before

    def join(self, joinables: list[Any], *, enable: bool) -> AbstractContextManager[Any]:
        return Join(joinables, enable=enable) if joinables else nullcontext()
