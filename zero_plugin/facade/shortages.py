"""What is said of a script that memory has ended, and what its launcher is asked for."""

from __future__ import annotations

import torch

from zero_plugin.config.attempt import Shortage
from zero_plugin.config.document import Document
from zero_plugin.config.tree import AUTO
from zero_plugin.memory.out_of_memory import FailedLoop, describe_shortage
from zero_plugin.meter import peak_bytes
from zero_plugin.resolve.facts import LoopFacts
from zero_plugin.strategies.base import Strategy
from zero_plugin.strategies.processes import Processes
from zero_plugin.training import Training

__all__ = ["Shortages"]


class Shortages:
    """What of the facade knows the loop in which memory has run out."""

    device: torch.device
    document: Document
    _cut: int
    _loop: LoopFacts
    _processes: Processes
    _strategy: Strategy
    _trained: list[Training]

    def _explain_shortage(self, error: BaseException) -> Shortage:
        training = self._trained[0] if self._trained else None
        micro_batch = self.document.deepspeed.get("train_micro_batch_size_per_gpu")
        loop = FailedLoop(
            trains=training is not None,
            micro_batch=self._loop.micro_batch,
            accumulation=1 if training is None else training.window.steps,
            cut=self._cut,
            is_open=micro_batch is not None and (micro_batch.value is AUTO or not micro_batch.origin.typed_by_user),
            decides=training is not None and training.window.is_decided,
            savings=() if training is None else self._strategy.savings(training.resolved),
            run=None if training is None or training.prediction is None else training.prediction.run,
            taken=peak_bytes(self.device) or 0,
        )
        return describe_shortage(error, loop, self.device, self._processes.rank)
