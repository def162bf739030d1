"""A loop that trains one weight on one device, for tests of the optimizer and the scheduler that scripts hold."""

from __future__ import annotations

import torch

from zero_plugin.loop.backward import run_through_one
from zero_plugin.loop.optimizer import AcceleratedOptimizer
from zero_plugin.loop.window import Window
from zero_plugin.strategies.events import subscribe
from zero_plugin.strategies.torch_session import TorchSession
from zero_plugin.strategies.torch_strategies import GUARDS


class Loop:
    """One weight of 1.0 on one device, with the window and the session that the facade would pass."""

    def __init__(self, steps: int = 1, lr: float = 0.5) -> None:
        self.weight = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(self.weight.weight)
        self.sgd = torch.optim.SGD(self.weight.parameters(), lr=lr, momentum=0.5)
        self.session = TorchSession(self.weight, self.weight, self.sgd, precision="no")
        subscribe(self.session, GUARDS, "all")
        self.window = Window(steps)
        self.optimizer = AcceleratedOptimizer(self.sgd)
        self.optimizer.run_in(self.window, self.session)

    def backward(self, gradient: float = 1.0) -> None:
        run_through_one(self.window, self.session, self.weight(torch.tensor([gradient])).sum())

    @property
    def value(self) -> float:
        return float(self.weight.weight.detach())
