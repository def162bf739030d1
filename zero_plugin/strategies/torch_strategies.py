"""Training without an engine: one device, and DDP.

Plain data parallelism: a whole copy of the model in every process.

One process on one device.

What a request becomes where no engine trains: weights in fp32, and torch's own optimizer with the states it has.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.optim import Optimizer

from zero_plugin.config.choices import DistributedType
from zero_plugin.config.placeholders import DummyOptim
from zero_plugin.config.plugins import AutocastKwargs, DistributedDataParallelKwargs
from zero_plugin.config.resolve.facts import OptimizerSection, Resolved
from zero_plugin.distributed.processes import Processes
from zero_plugin.errors import ConfigError, LoopError, Problem
from zero_plugin.strategies.base import Saving, Session, SessionRequest, Strategy
from zero_plugin.strategies.experts import find_expert_layers, reach_every_expert
from zero_plugin.strategies.optimizer_only import UnpreparedOptimizer
from zero_plugin.strategies.precision import autocast_as
from zero_plugin.strategies.torch_optimizers import build_optimizer
from zero_plugin.strategies.torch_session import TorchSession, torch_session
from zero_plugin.strategies.window import AccumulationWindow

_log = logging.getLogger(__name__)


def convert_weights_to_fp32(request: SessionRequest) -> None:
    """Turn 16-bit weights that are trained into fp32, aloud: updates below their last bit would be lost.

    ZeRO keeps fp32 masters beside 16-bit weights, or trains in fp32 where no mixed precision is asked for. Frozen
    weights stay as they are under mixed precision, where autocast joins the types.
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
        f"{len(chosen)} parameters of the {type(request.model).__name__} came in 16 bits and are trained in fp32, as "
        "under ZeRO; mixed_precision says what they compute in"
    )


def torch_optimizer(request: SessionRequest) -> Optimizer | None:
    """The request's optimizer, with a placeholder replaced by what the config's section describes.

    States that it was given before go where its parameters are by now, as torch's `load_state_dict` would put them.
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
    """Each state of a parameter that is a tensor, with the dict that holds it and its name there."""
    states = getattr(optimizer, "state", {}).get(p, {})  # a wrapper of another library may have none
    return [(states, key, value) for key, value in states.items() if isinstance(value, Tensor)]


def _fused(section: OptimizerSection, model: nn.Module) -> OptimizerSection:
    """The section with torch's fused kernel for Adam and AdamW: the same update in one pass, several times faster.

    Not where the section itself says how. SGD and Adagrad stay as they are: those kernels refuse sparse gradients.
    """
    says_how = {"fused", "foreach", "capturable", "differentiable"} & section.params.keys()
    served = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in model.parameters())
    if section.type.lower() not in ("adam", "adamw") or says_how or not served:
        return section
    return OptimizerSection(section.type, {**section.params, "fused": True})


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's own, with the attributes of the module inside, as engines have: `model.config`, `model.generate(…)`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not there yet
                raise
            return getattr(super().__getattr__("module"), name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse: what comes back would be wrapped for a group of processes that is another one, or none.

        Raises:
            LoopError: always.
        """
        kind = type(self.module).__name__
        raise LoopError(
            f"a prepared {kind} is pickled (torch.save, copy to another process): under DDP it belongs to this run's "
            f"processes.\nPickle accelerator.unwrap_model(model), which is the {kind} itself; or save its weights with "
            "accelerator.save_model(model, folder)."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))  # type: ignore[no-untyped-call]
        return made


class DdpStrategy(Strategy):
    """DistributedDataParallel over NCCL on GPUs, gloo on CPUs."""

    name = "ddp"
    optimizer_may_follow = True

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self.distributed_type = processes.distributed_type

    def refuse(self) -> str | None:
        return "only one process runs" if self._processes.world_size == 1 else None

    def build_session(self, request: SessionRequest, processes: Processes) -> Session:
        convert_weights_to_fp32(request)
        module = request.model.to(processes.device) if request.is_placed else request.model
        for layer in find_expert_layers(module, ()):
            reach_every_expert(layer, with_gradients=True)
        optimizer = torch_optimizer(request)
        trains = not request.only_evaluates and any(p.requires_grad for p in module.parameters())
        if trains and optimizer is None:
            _log.info(
                f"the {type(module).__name__} came without an optimizer: DDP keeps room for its gradients until one "
                "comes; prepare_model(model, evaluation_mode=True) does without, and so does a frozen model"
            )
        model = self._wrap(module, request.is_placed, request.resolved.accumulation) if trains else module
        return torch_session(model, request, optimizer, self.handlers)

    def _wrap(self, module: nn.Module, is_placed: bool, accumulation: int) -> DistributedDataParallel:
        given = self.handlers.ddp or DistributedDataParallelKwargs()
        if given.static_graph and accumulation > 1:
            where = "DistributedDataParallelKwargs(static_graph=True)"
            message = f"torch has no static graph of windows of {accumulation} micro-batches"
            raise ConfigError([Problem(where, "", message, "Leave it out, or accumulate 1.")])
        ddp = DistributedDataParallel(
            module,
            device_ids=[self._processes.device] if is_placed and self._processes.device.type == "cuda" else None,
            **given.to_kwargs(),
        )
        given.register_comm_hook(ddp)
        return ddp

    def savings(self, resolved: Resolved) -> tuple[Saving, ...]:
        """Gradients that are views of DDP's buckets, then what ZeRO saves."""
        if (self.handlers.ddp or DistributedDataParallelKwargs()).gradient_as_bucket_view:
            return super().savings(resolved)
        text = (
            "gradients that are views of DDP's buckets: Accelerator(kwargs_handlers=[DistributedDataParallelKwargs("
            "gradient_as_bucket_view=True)]), unless the script keeps gradients over zero_grad()"
        )
        return (Saving(text, {"gradient_views": True}), *super().savings(resolved))

    def autocast(self, precision: str, handler: AutocastKwargs | None) -> AbstractContextManager[Any]:
        return autocast_as(precision, self._processes.device.type, handler)

    def add_optimizer(self, session: Session, request: SessionRequest) -> None:
        """See `Strategy.add_optimizer`.

        Raises:
            LoopError: the weights are in 16 bits, or the model was prepared for evaluation.
        """
        if any(p.requires_grad and p.dtype in (torch.bfloat16, torch.float16) for p in request.model.parameters()):
            raise LoopError(
                f"prepare() got the optimizer of the {type(request.model).__name__} in a later call than the model, "
                "whose weights are in 16 bits: they are trained in fp32, which had to be known then.\n"
                "Pass them in one call: model, optimizer = prepare(model, optimizer)."
            )
        if any(p.requires_grad for p in request.model.parameters()) and session.model is session.module:
            raise LoopError(
                f"prepare() got the optimizer of the {type(request.model).__name__} in a later call than the model, "
                "which was prepared frozen or for evaluation only.\nPass them in one call."
            )
        optimizer = torch_optimizer(request)
        assert isinstance(session, TorchSession)
        assert optimizer is not None, "the request is for one"
        session.train_with(optimizer)

    @contextmanager
    def reduce_next_backward(self, session: Session) -> Iterator[None]:
        ddp = session.model
        if not isinstance(ddp, DistributedDataParallel):
            yield
            return
        before = ddp.require_backward_grad_sync
        ddp.require_backward_grad_sync = True
        ddp.reducer._rebuild_buckets()
        ddp.reducer.prepare_for_backward([])  # DDP does so in a forward, but not in one that is to stay local
        try:
            yield
        finally:
            ddp.require_backward_grad_sync = before

    def join(self, joinables: list[Any], *, enable: bool) -> AbstractContextManager[Any]:
        return Join(joinables, enable=enable) if joinables else nullcontext()


class SingleStrategy(Strategy):
    """Plain torch on one device."""

    name = "single"
    distributed_type = DistributedType.NO
    optimizer_may_follow = True

    def __init__(self, processes: Processes) -> None:
        self._processes = processes

    def refuse(self) -> str | None:
        if self._processes.world_size > 1:
            return f"{self._processes.world_size} processes run; one device serves one"
        return None

    def build_session(self, request: SessionRequest, processes: Processes) -> Session:
        convert_weights_to_fp32(request)
        module = request.model.to(processes.device) if request.is_placed else request.model
        return torch_session(module, request, torch_optimizer(request), self.handlers)

    def autocast(self, precision: str, handler: AutocastKwargs | None) -> AbstractContextManager[Any]:
        return autocast_as(precision, self._processes.device.type, handler)

    def add_optimizer(self, session: Session, request: SessionRequest) -> None:
        convert_weights_to_fp32(request)
        optimizer = torch_optimizer(request)
        assert isinstance(session, TorchSession)
        assert optimizer is not None, "the request is for one"
        session.train_with(optimizer)

    def hold_optimizer(self, optimizer: Optimizer, window: AccumulationWindow) -> UnpreparedOptimizer:
        """See `Strategy.hold_optimizer`: a model that stays as it is trains well here."""
        return UnpreparedOptimizer(optimizer, window, steps=True)
