"""`AcceleratedScheduler`, which `prepare` returns for a learning-rate scheduler: it follows applied optimizer steps."""

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
    """A prepared learning-rate scheduler: `step` advances it only if the optimizer applied a step since the last call.

    Args:
        scheduler: the torch scheduler.
        optimizers: the prepared optimizer that it drives, or several, which all must have applied a step.
        step_with_optimizer: if False, every call of `step` advances it once, independently of the optimizer.
        split_batches: the batch size of the loader is that of all processes, so that an applied step counts once.
        times: how many times it advances per applied step. None counts as Accelerate does: once for each process, or
            once with `split_batches`.
        typed_per_step: how many of the steps that the script counts correspond to one applied step; None is `times`.

    Attributes:
        length: compares the length of the scheduler with that of the loop.
        times: how many times it advances per applied step.
    """

    _is_accelerate_prepared = True  # Accelerate's mark, which scripts look for

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
        # ReduceLROnPlateau counts measurements, and each call has one, independently of `scheduler_counts`.
        self.times = 1 if self._measures or not step_with_optimizer else times
        self._applied = [optimizer.applied_steps for optimizer in self.optimizers]  # at the last call of `step`
        self.length = SchedulerLength(scheduler, self.times, typed_per_step or self.times)
        for optimizer in self.optimizers:
            optimizer.schedulers.append(self)
        if not step_with_optimizer and (driven := getattr(scheduler, "optimizer", None)) is not None:
            driven._opt_called = True  # else torch warns that the scheduler steps before its optimizer

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance, unless an optimizer applied no step since the last call: inside a window, or if it was skipped.

        ReduceLROnPlateau takes every measurement.
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
                break  # several steps at a time must not pass the end of OneCycleLR, where it raises
            self.scheduler.step(*args, **kwargs)

    def describe(
        self, section: SchedulerSection | None, facts: SchedulerFacts | None, steps_per_epoch: int | None
    ) -> str | None:
        """The line about its learning rates that is logged at the start; see `describe_section`."""
        if isinstance(self.scheduler, CurveLR) and section is not None:
            rates = self.scheduler.base_lrs
            return describe_section(section, [float(rate) for rate in rates], facts, steps_per_epoch)
        return describe_torch_scheduler(self.scheduler, self.times, steps_per_epoch)

    def describe_end(self) -> str | None:
        """A line if the loop ended before the scheduler."""
        return self.length.at_end(self.get_last_lr()[0])

    def get_last_lr(self) -> list[float]:
        """The learning rate of each parameter group for the next step."""
        return [float(group["lr"]) for optimizer in self.optimizers[:1] for group in optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The state of the torch scheduler."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the torch scheduler."""
        self.scheduler.load_state_dict(state_dict)
        self.length.resume(getattr(self.scheduler, "last_epoch", 0))  # a ChainedScheduler has none
        self._applied = [optimizer.applied_steps for optimizer in self.optimizers]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)
