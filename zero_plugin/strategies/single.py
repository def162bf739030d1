"""One process on one device."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch.optim import Optimizer

from zero_plugin.accumulation import AccumulationWindow
from zero_plugin.distributed_type import DistributedType
from zero_plugin.plugins import AutocastKwargs
from zero_plugin.strategies.autocast import autocast_as
from zero_plugin.strategies.base import Session, SessionRequest, Strategy
from zero_plugin.strategies.lone import LoneOptimizer
from zero_plugin.strategies.plain_torch import keep_weights_in_fp32, torch_optimizer
from zero_plugin.strategies.processes import Processes
from zero_plugin.strategies.torch_session import TorchSession, torch_session

__all__ = ["SingleStrategy"]


class SingleStrategy(Strategy):
    """Plain torch on one device."""

    name = "single"
    distributed_type = DistributedType.NO
    optimizer_may_follow = True

    def __init__(self, processes: Processes) -> None:
        self._processes = processes

    def refuse(self) -> str | None:
        """See `Strategy.refuse`."""
        if self._processes.world_size > 1:
            return f"{self._processes.world_size} processes run; one device serves one"
        return None

    def build_session(self, request: SessionRequest, processes: Processes) -> Session:
        """See `Strategy.build_session`."""
        keep_weights_in_fp32(request)
        module = request.model.to(processes.device) if request.is_placed else request.model
        return torch_session(module, request, torch_optimizer(request), self.handlers)

    def autocast(self, precision: str, handler: AutocastKwargs | None) -> AbstractContextManager[Any]:
        """See `Strategy.autocast`."""
        return autocast_as(precision, self._processes.device.type, handler)

    def add_optimizer(self, session: Session, request: SessionRequest) -> None:
        """See `Strategy.add_optimizer`."""
        keep_weights_in_fp32(request)
        optimizer = torch_optimizer(request)
        assert isinstance(session, TorchSession)
        assert optimizer is not None, "the request is for one"
        session.train_with(optimizer)

    def hold_optimizer(self, optimizer: Optimizer, window: AccumulationWindow) -> LoneOptimizer:
        """See `Strategy.hold_optimizer`: a model that stays as it is trains well here."""
        return LoneOptimizer(optimizer, window, steps=True)
