"""What `prepare` returns for an optimizer and a schedule: the same calls on every path, acting where windows end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from zero_plugin.accumulation import AccumulationWindow
from zero_plugin.announce import announce
from zero_plugin.errors import LoopError
from zero_plugin.resolve.facts import SchedulerFacts
from zero_plugin.resolve.resolved import SchedulerSection
from zero_plugin.schedule_report import ScheduleLength, describe_section, describe_torch_schedule
from zero_plugin.schedules import CurveLR
from zero_plugin.strategies.base import Session

__all__ = ["PreparedOptimizer", "PreparedScheduler"]


class PreparedOptimizer(Optimizer):
    """The one place where parameters change: `step` applies the gradients where an accumulation window ends.

    It is a torch optimizer for whoever asks, also for a schedule that is built on it; its groups and states are those
    of the optimizer that runs.

    A step whose gradients are not finite (under fp16: an overflow) is skipped on every path: weights, optimizer states
    and schedules stay. After `session.most_skips` in a row the run stops.

    Attributes:
        step_was_skipped: whether the last `step` that ended a window was skipped for non-finite gradients.
        skipped_in_a_row: how many were, up to the last one.
        applied_steps: how many were not.
        schedules: those prepared for it.
    """

    def __init__(self, session: Session, window: AccumulationWindow) -> None:
        # Optimizer.__init__ is not called: groups and state live in the optimizer that runs.
        self.session = session
        self.step_was_skipped = False
        self.skipped_in_a_row = 0
        self.applied_steps = 0
        self.schedules: list[PreparedScheduler] = []
        self.last_norm: Tensor | None = None
        self.acted = False  # whether the last call of step() ended a window
        self._window = window
        self._corrected = False
        self._told_of_skips = False
        self._after_step: list[Callable[[], None]] = []

    @property
    def optimizer(self) -> Optimizer:
        """The torch optimizer that runs."""
        if self.session.optimizer is None:
            raise LoopError("this optimizer's training has ended (end_training() was called)")
        return self.session.optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The live groups."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The live states."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The optimizer's own defaults."""
        return self.optimizer.defaults

    def state_dict(self) -> dict[str, Any]:
        """The running optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the running optimizer's state."""
        self.optimizer.load_state_dict(state_dict)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Apply the window's gradients if the window ends here; otherwise nothing.

        Raises:
            LoopError: a closure is given, or steps come at a cadence that is not the accumulation's.
        """
        if closure is not None:
            raise LoopError("optimizer.step(closure) is not supported: gradients come from accelerator.backward(loss).")
        _ = self.optimizer  # raises once training has ended
        self.acted = self._window.count_step()
        if not self.acted:
            return
        self._correct()
        last_chance = self.skipped_in_a_row + 1 == self.session.most_skips
        culprit = self.session.first_nonfinite() if last_chance else None
        self.step_was_skipped = not self.session.step()
        self._corrected = False
        if self.step_was_skipped:
            self._count_skip(culprit)
            return
        self.skipped_in_a_row = 0
        self.applied_steps += 1
        for call in self._after_step:
            call()

    @property
    def loss_scale(self) -> float:
        """The factor on the loss under fp16; 1.0 otherwise."""
        return self.session.loss_scale

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002 - torch's signature
        """Drop the gradients if this stands between a backward and its step; elsewhere it has nothing to do.

        Args:
            set_to_none: accepted as torch's; gradients are always set to None.
        """
        if self._window.dropping_is_meant:
            self.session.drop_gradients()
            self._corrected = False
            self._window.restart()
        else:
            self.session.drop_strays()

    def clip(self, max_norm: float, *, norm_type: float, only: list[Tensor] | None) -> Tensor:
        """See `Session.clip`; inside a window, where the step's norm is not known yet, nan and nothing happens."""
        if not self._window.ends_here:
            return torch.tensor(float("nan"))
        self._correct()
        self.last_norm = self.session.clip(max_norm, norm_type=norm_type, only=only)
        return self.last_norm

    def call_after_step(self, call: Callable[[], None]) -> None:
        """Run `call` after every applied step."""
        self._after_step.append(call)

    def _count_skip(self, culprit: str | None) -> None:
        self.skipped_in_a_row += 1
        if not self._told_of_skips and self.session.loss_scale == 1.0:
            self._told_of_skips = True  # under fp16 skips are part of finding the scale
            announce(
                f"the step after {self.applied_steps} was skipped, since its gradients are not finite; the weights "
                f"stay as they were. After {self.session.most_skips} skips in a row the run stops."
            )
        if self.skipped_in_a_row >= self.session.most_skips:
            named = f"the first is that of {culprit}" if culprit else "the parameter is not found"
            raise LoopError(
                f"{self.skipped_in_a_row} steps in a row were skipped, after {self.applied_steps} applied ones: their "
                f"gradients are not finite; {named}. The loss scale is {self.session.loss_scale:g}.\n"
                "Look at that layer's inputs and at the loss (a division by 0, log(0), an empty batch), or lower the "
                "learning rate; torch.autograd.set_detect_anomaly(True) finds the operation."
            )

    def _correct(self) -> None:
        """Make up for a window that proved shorter than the number its losses were divided by."""
        if not self._corrected and self._window.correction != 1.0:
            self.session.scale_gradients(self._window.correction)
        self._corrected = True

    def __repr__(self) -> str:
        return f"PreparedOptimizer({self.session.optimizer!r})"

    def __getattr__(self, name: str) -> Any:
        # Only what is not found here: attributes of the running optimizer, such as a third-party class' own methods.
        if name.startswith("_") or name == "session":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        raise LoopError("a prepared optimizer cannot be pickled; save with accelerator.save_state()")


class PreparedScheduler:
    """A schedule that advances only with applied optimizer steps.

    Args:
        scheduler: the torch schedule.
        optimizer: the prepared optimizer that it drives.
        times: how many times it advances per applied step: 1, or the number of processes in Accelerate's counting.
        typed_per_step: how many of the steps that the script counts are one applied step, where it is not `times`.
    """

    def __init__(
        self, scheduler: Any, optimizer: PreparedOptimizer, *, times: int, typed_per_step: int | None = None
    ) -> None:
        self.scheduler = scheduler
        self.optimizer = optimizer
        # A plateau schedule counts measurements, which are as many as calls, whoever counts steps.
        self._times = 1 if isinstance(scheduler, ReduceLROnPlateau) else times
        self.length = ScheduleLength(scheduler, self._times, typed_per_step or self._times)
        optimizer.schedules.append(self)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance, if the optimizer's last `step` was applied."""
        if not self.optimizer.acted or self.optimizer.step_was_skipped:
            return
        if (line := self.length.count()) is not None:
            announce(line)
        for _ in range(self._times):
            total = getattr(self.scheduler, "total_steps", None)
            if self._times > 1 and total is not None and self.scheduler.last_epoch + 1 >= total:
                break  # W steps at a time may overshoot OneCycleLR's end, where its rate rises again, then it raises
            self.scheduler.step(*args, **kwargs)

    def describe(
        self, section: SchedulerSection | None, facts: SchedulerFacts | None, steps_per_epoch: int | None
    ) -> str | None:
        """The line on its learning rates that is printed at start; see `describe_section`."""
        if isinstance(self.scheduler, CurveLR) and section is not None:
            rates = self.scheduler.base_lrs
            return describe_section(section, [float(rate) for rate in rates], facts, steps_per_epoch)
        return describe_torch_schedule(self.scheduler, self._times, steps_per_epoch)

    def describe_end(self) -> str | None:
        """A line where the loop has ended before the schedule."""
        return self.length.at_end(self.get_last_lr()[0])

    def get_last_lr(self) -> list[float]:
        """The learning rate of each group for the coming step."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The schedule's state."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the schedule's state."""
        self.scheduler.load_state_dict(state_dict)
        self.length.resume(self.scheduler.last_epoch)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)
