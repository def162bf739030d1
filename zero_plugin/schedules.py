"""Builds the torch schedule that a configuration's `scheduler` section describes."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from zero_plugin.curves import CURVES, Curve, describe_curve
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.resolve.resolved import SchedulerSection

__all__ = ["CurveLR", "build_schedule"]


class CurveLR(LRScheduler):
    """A schedule that sets every group's learning rate (and betas) to its `Curve` at the number of steps taken.

    Args:
        optimizer: the optimizer whose live `param_groups` it drives.
        curve: the values by step.
    """

    def __init__(self, optimizer: Optimizer, curve: Curve) -> None:
        self.curve = curve
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        """The learning rate of each group at the present step."""
        return list(self.curve.lrs(self.last_epoch))

    def step(self, epoch: int | None = None) -> None:
        """Advance by one applied optimizer step, or to step `epoch`."""
        super().step(epoch)
        self._apply_betas()

    def state_dict(self) -> dict[str, Any]:
        """The number of steps taken; the curve itself comes from the configuration."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a saved step, and set the groups to its values at once."""
        self.last_epoch = int(state_dict["last_epoch"])
        self._step_count = self.last_epoch + 1
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            _set_lr(group, lr)
        self._apply_betas()

    def _apply_betas(self) -> None:
        if self.curve.betas is not None:
            for group, betas in zip(self.optimizer.param_groups, self.curve.betas(self.last_epoch), strict=True):
                group["betas"] = betas


def build_schedule(section: SchedulerSection, optimizer: Optimizer) -> LRScheduler:
    """The schedule of `section` on `optimizer`: the same learning rate at every applied step as DeepSpeed's engine.

    Args:
        section: one of DeepSpeed's five types, or a class of `torch.optim.lr_scheduler` by its exact name.
        optimizer: torch's optimizer, whose groups get the first step's learning rate now.

    Raises:
        ConfigError: the type or a parameter is unknown, missing or impossible.
    """
    if section.type in CURVES:
        lrs = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        curve = describe_curve(section, lrs)
        if curve.betas is not None and "betas" not in optimizer.defaults:
            name = type(optimizer).__name__
            warnings.warn(f"OneCycle leaves momentum alone: {name} has no betas to cycle.", stacklevel=2)
            curve = Curve(curve.lrs, None, curve.warmup_steps, curve.total_steps)
        return CurveLR(optimizer, curve)
    build = getattr(lr_scheduler, section.type, None)
    if not (isinstance(build, type) and issubclass(build, LRScheduler)):
        message = f"{section.type} is neither a schedule of DeepSpeed nor one of torch.optim.lr_scheduler."
        fix = f"Write one of {', '.join(CURVES)}, or an exact class name such as CosineAnnealingLR."
        raise ConfigError([Problem("the scheduler section", "scheduler.type", message, fix)])
    try:
        return build(optimizer, **section.params)
    except (TypeError, ValueError) as error:
        fix = f"Write the arguments of torch.optim.lr_scheduler.{section.type}."
        raise ConfigError([Problem("the scheduler section", "scheduler.params", str(error), fix)]) from error


def _set_lr(group: dict[str, Any], lr: Any) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr
