"""Detect steps that differ between processes: learning rates, weights, tensors of the script, missing steps."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from zero_plugin.distributed.collectives import is_same_on_all
from zero_plugin.distributed.differences import compare
from zero_plugin.errors import LoopError
from zero_plugin.strategies.copied_weights import refuse_differences, summarize
from zero_plugin.strategies.events import Guard, Sampling
from zero_plugin.strategies.precision import FoundInf


class DifferingSteps(Guard):
    """A guard that checks that a model's steps do not differ between the processes.

    Mistake: a scheduler that steps by each process's own loss; `if is_main_process: load_state_dict(best)`; a process
    that leaves out a step, or runs other backwards; a tensor that the script trains without averaging its gradient.
    Cost: in sampled steps, one small collective, and the norm and the sum of each weight.
    """

    def __init__(self, session: Any, sampling: Sampling) -> None:
        super().__init__(session, sampling)
        self._applied: bool | FoundInf = True  # whether a step has applied the last average
        self._left_out = 0  # averages that no step of this process has applied
        self._takes_next = False  # whether the next step takes a summary of the weights
        self._summary: Tensor | None = None

    @classmethod
    def is_needed(cls, session: Any) -> bool:  # noqa: ARG003
        """Return whether several processes run: only these can differ."""
        return dist.is_initialized() and dist.get_world_size() > 1

    def before_step(self) -> None:
        """Take a summary of the weights, if the last comparison has requested it.

        Do not take it earlier: sharpness-aware minimisation perturbs the weights by the process's own gradient.
        """
        if self._takes_next:
            self._takes_next = False
            self._summary = summarize(self.session.copies)

    def stepped(self, applied: bool | FoundInf) -> None:
        """Note whether a step has applied the average. A process may leave out a step that the others skip."""
        self._applied = applied

    def averages(self) -> None:
        """Compare with the other processes in the sampled steps. Collective.

        Raises:
            LoopError: on every process, if a process has left out a step, or if numbers of the parameter groups, the
                weights or the script's tensors differ. The message lists each value and its ranks.
        """
        applied, self._applied = self._applied, False
        was_left_out = applied.read() if isinstance(applied, FoundInf) else not applied
        self._left_out += was_left_out
        session = self.session
        if session.optimizer is None or not self.sampling.is_due():
            return
        numbers, tensors = _numbers_of(session.optimizer), _describe_tensors(session.script_tensors)
        left_out = {"backwards without a step": str(self._left_out)}
        if not is_same_on_all(json.dumps([numbers, tensors, left_out], sort_keys=True)):
            self._refuse(numbers, left_out, tensors)
        taken, self._summary = self._summary, None
        refuse_differences(session, session.copies, taken)
        self._takes_next = bool(session.copies)

    def _refuse(self, numbers: dict[str, str], left_out: dict[str, str], tensors: dict[str, str]) -> None:
        if differences := compare(numbers):
            raise LoopError(
                f"the parameter groups of the {type(self.session.optimizer).__name__} differ between the processes:\n"
                f"{differences}\n"
                "Every process has to step with the same numbers. If they come from a loss, as in a scheduler's "
                'step(loss), average it over the processes: accelerator.reduce(loss, "mean").'
            )
        if differences := compare(left_out):
            raise LoopError(
                "the processes do not step after the same backwards, so their weights differ: some run more backwards "
                "before a step(), or leave out a step() that others make:"
                f"\n{differences}\n"
                "If numbers of backwards differ, run all but the last one before each step() inside "
                "accelerator.no_sync(model), which sums them. "
                "If a batch decides whether to step, let all processes decide alike, by a value that all have, e.g. "
                'accelerator.reduce(loss, "mean").'
            )
        raise LoopError(
            "tensors that the script trains in addition to the prepared models, and that losses depend on, differ "
            f"between the processes:\n{compare(tensors)}\n"
            "Make each an nn.Parameter of a module, and prepare() this module with its optimizer. Or average its "
            'gradient before its own step: tensor.grad = accelerator.reduce(tensor.grad, "mean").'
        )


def _describe_tensors(tensors: Collection[Tensor]) -> dict[str, str]:
    return {
        f"tensor {number} of shape {tuple(tensor.shape)}": (
            str(tensor.item()) if tensor.numel() == 1 else f"norm {torch.linalg.vector_norm(tensor.detach()).item()}"
        )
        for number, tensor in enumerate(tensors, 1)
    }


def _numbers_of(optimizer: Optimizer) -> dict[str, str]:
    return {
        f"group {index}: {key}": number
        for index, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key != "params" and (number := _as_number(value)) is not None
    }


def _as_number(value: Any) -> str | None:
    """Return a number, a tensor of one, or several numbers as text; None for any other value."""
    if isinstance(value, Tensor):
        return str(value.item()) if value.numel() == 1 else None
    if isinstance(value, tuple | list):
        numbers = [number for part in value if (number := _as_number(part)) is not None]
        return f"({', '.join(numbers)})" if len(numbers) == len(value) else None
    return str(value) if isinstance(value, bool | int | float) else None
