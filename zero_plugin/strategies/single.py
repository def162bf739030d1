"""One process on one device."""

from __future__ import annotations

from zero_plugin.strategies.base import Session, SessionRequest, Strategy
from zero_plugin.strategies.processes import Processes
from zero_plugin.strategies.torch_session import keep_weights_in_fp32, torch_optimizer, torch_session

__all__ = ["SingleStrategy"]


class SingleStrategy(Strategy):
    """Plain torch on one device."""

    name = "single"

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
        module = request.model.to(processes.device)
        return torch_session(module, request, torch_optimizer(request))
