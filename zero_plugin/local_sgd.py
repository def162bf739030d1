"""Local SGD: each process steps with its own gradients; the weights are averaged every few steps."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import nn

from zero_plugin.config.parallelism import SEQUENCE_KEY
from zero_plugin.errors import LoopError

if TYPE_CHECKING:
    from zero_plugin.accelerator import Accelerator


class LocalSGD:
    """A context around the loop: backwards do not average gradients, and `step` averages the weights every few steps.

    The algorithm is from Stich, "Local SGD Converges Fast and Communicates Little" (2019). Optimizer states and buffers
    stay local to each process. Leaving the context averages once more: all processes continue with the same weights.

    Args:
        accelerator: the `Accelerator` that prepared `model`.
        model: the model that `prepare` returned.
        local_sgd_steps: calls of `step` from one average to the next, at least 1.
        enabled: False makes this an ordinary loop. One process always has an ordinary loop.

    Raises:
        LoopError: the model is not prepared; the run uses DeepSpeed, whose processes share one optimizer; processes
            share samples; or `local_sgd_steps` is below 1.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        if local_sgd_steps < 1:
            raise LoopError(f"LocalSGD: local_sgd_steps is {local_sgd_steps}; write 1 or more.")
        training = accelerator._prepared.training_of(model)
        if training is None:
            raise LoopError("LocalSGD got a model that is not prepared; pass what accelerator.prepare() returned.")
        if not training.session.unpartitioned_gradients:
            raise LoopError(
                "LocalSGD does not work under DeepSpeed: processes share one optimizer and cannot step separately.\n"
                "Launch without DeepSpeed, or remove LocalSGD."
            )
        if enabled and (sharing := accelerator._run.processes.shared_by) > 1:
            raise LoopError(
                f"LocalSGD with {SEQUENCE_KEY} {sharing}: each process has the gradients of only a part of its samples "
                f"and cannot step with them alone.\nWrite {SEQUENCE_KEY}: 1, or remove LocalSGD."
            )
        self.enabled = enabled and accelerator.num_processes > 1
        self.num_steps = 0
        self.local_sgd_steps = local_sgd_steps
        self.accelerator = accelerator
        self.model = model
        self._training = training
        self._local = ExitStack()

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self._training.stepped_apart = True
            self._local.enter_context(self.accelerator.no_sync(self.model))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._local.close()
        if self.enabled and kind is None:  # after an error the other processes may never reach this collective call
            self._average()

    def step(self) -> None:
        """Count one batch; every `local_sgd_steps`-th call averages the weights over all processes."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        for parameter in self.model.parameters():
            parameter.copy_(self.accelerator.reduce(parameter, "mean"))
