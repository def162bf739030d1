"""What `prepare` returns for a scheduler: it advances with applied optimizer steps only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from zero_plugin.config.resolve.facts import SchedulerFacts, SchedulerSection
from zero_plugin.distributed.collectives import announce, num_processes
from zero_plugin.loop.optimizer import AcceleratedOptimizer
from zero_plugin.loop.schedule_report import SchedulerLength, describe_section, describe_torch_scheduler
from zero_plugin.strategies.torch_optimizers import CurveLR


class AcceleratedScheduler:
    """A scheduler that advances only with applied optimizer steps: once per call, however many were applied before it.

    Args:
        scheduler: the torch scheduler.
        optimizers: the prepared optimizer that it drives, or several, which all have to step.
        step_with_optimizer: False: every call of `step` advances it once, whatever the optimizer did.
        split_batches: the loader's batch size is that of all processes, so that an applied step counts once.
        times: how many times it advances per applied step; absent: as Accelerate counts, the number of processes, or
            once with `split_batches`.
        typed_per_step: how many of the steps that the script counts are one applied step, where it is not `times`.

    Attributes:
        length: compares it with the loop's.
        times: how many times it advances per applied step.
    """

    _is_accelerate_prepared = True  # what scripts look for, under Accelerate's name

    def __init__(
        self,
        scheduler: Any,
        optimizers: AcceleratedOptimizer | Sequence[AcceleratedOptimizer],
        step_with_optimizer: bool = True,
        split_batches: bool = False,
        *,
        times: int | None = None,
        typed_per_step: int | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = list(optimizers) if isinstance(optimizers, Sequence) else [optimizers]
        self.step_with_optimizer = step_with_optimizer
        self.split_batches = split_batches
        if times is None:
            times = 1 if split_batches else num_processes()
        self._measures = isinstance(scheduler, ReduceLROnPlateau)
        # A plateau scheduler counts measurements, which are as many as calls, whoever counts steps.
        self.times = 1 if self._measures or not step_with_optimizer else times
        self._applied = [optimizer.applied_steps for optimizer in self.optimizers]  # at the last call of `step`
        self.length = SchedulerLength(scheduler, self.times, typed_per_step or self.times)
        for optimizer in self.optimizers:
            optimizer.schedulers.append(self)
        if not step_with_optimizer and (driven := getattr(scheduler, "optimizer", None)) is not None:
            driven._opt_called = True  # else torch's scheduler warns that it moves ahead of its optimizer

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance, unless every step of an optimizer since the last call was skipped, or stood inside a window.

        A ReduceLROnPlateau takes every measurement.
        """
        if self.step_with_optimizer and not self._measures:
            stays = False
            for index, optimizer in enumerate(self.optimizers):
                applied, self._applied[index] = self._applied[index], optimizer.applied_steps
                if applied == optimizer.applied_steps and (not optimizer.acted or optimizer.step_was_skipped):
                    stays = True
            if stays:
                return
        if (line := self.length.count()) is not None:
            announce(line)
        for _ in range(self.times):
            total = getattr(self.scheduler, "total_steps", None)
            if self.times > 1 and total is not None and self.scheduler.last_epoch + 1 >= total:
                break  # W steps at a time may overshoot OneCycleLR's end, where its rate rises again, then it raises
            self.scheduler.step(*args, **kwargs)

    def describe(
        self, section: SchedulerSection | None, facts: SchedulerFacts | None, steps_per_epoch: int | None
    ) -> str | None:
        """The line on its learning rates that is printed at start; see `describe_section`."""
        if isinstance(self.scheduler, CurveLR) and section is not None:
            rates = self.scheduler.base_lrs
            return describe_section(section, [float(rate) for rate in rates], facts, steps_per_epoch)
        return describe_torch_scheduler(self.scheduler, self.times, steps_per_epoch)

    def describe_end(self) -> str | None:
        """A line where the loop has ended before the scheduler."""
        return self.length.at_end(self.get_last_lr()[0])

    def get_last_lr(self) -> list[float]:
        """The learning rate of each group for the coming step."""
        return [float(group["lr"]) for optimizer in self.optimizers[:1] for group in optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the scheduler's state."""
        self.scheduler.load_state_dict(state_dict)
        self.length.resume(getattr(self.scheduler, "last_epoch", 0))  # a ChainedScheduler has none
        self._applied = [optimizer.applied_steps for optimizer in self.optimizers]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)
