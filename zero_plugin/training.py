"""One prepared model: its session, its configuration, its window and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zero_plugin.accumulation import AccumulationWindow
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.memory.measuring import Prediction
from zero_plugin.optimizer import AcceleratedOptimizer
from zero_plugin.placeholders import DummyOptim
from zero_plugin.resolve.facts import Facts
from zero_plugin.resolve.resolved import Resolved
from zero_plugin.strategies.base import Session

__all__ = ["Training"]


@dataclass(slots=True)
class Training:
    """One prepared model.

    Attributes:
        session: runs it.
        facts: what it was resolved from.
        resolved: its configuration.
        window: counts its micro-batches.
        parameters: those of the module that are trained, listed once: walking a module takes longer than clipping a
            small one, and a loop may freeze a model for another model's loss.
        given_optimizer: what the user passed to `prepare`.
        optimizer: what the user got for it; None for a model that is not trained.
        ids: of the parameters.
        looks: how many of its backwards `FirstSteps` has looked at.
        reached: whether a gradient has come since it was last set to False; see `watch_gradients`.
        take_back_schedule: undoes the schedule that the configuration describes and that steps by itself.
        prediction: what a plan says that it takes; None where none was made.
        reduces_each_batch: whether gradients are averaged over the processes in each micro-batch, not in the last one
            of a window.
    """

    session: Session
    facts: Facts
    resolved: Resolved
    window: AccumulationWindow
    parameters: tuple[nn.Parameter, ...]
    given_optimizer: Optimizer | DummyOptim | None = None
    optimizer: AcceleratedOptimizer | None = None
    ids: frozenset[int] = field(init=False)
    looks: int = 0
    reached: bool = False
    watches: bool = False
    take_back_schedule: Callable[[], None] | None = None
    prediction: Prediction | None = None
    reduces_each_batch: bool = False

    def __post_init__(self) -> None:
        self.ids = frozenset(map(id, self.parameters))

    def is_of_model(self, model: Any) -> bool:
        """Whether `model` is this one, prepared or the user's own module."""
        return model is self.session.model or model is self.session.module

    def is_of_optimizer(self, optimizer: Any) -> bool:
        """Whether `optimizer` is this one: as given, as prepared, or the torch object that runs."""
        known = (self.given_optimizer, self.optimizer, self.session.optimizer)
        return any(optimizer is candidate for candidate in known if candidate is not None)

    def describe_end(self) -> list[str]:
        """Lines on schedules that the loop has not taken to their end."""
        schedules = [] if self.optimizer is None else self.optimizer.schedules
        return [line for schedule in schedules if (line := schedule.describe_end()) is not None]

    def measure(self) -> dict[str, float]:
        """What the last step tells of itself; see `TrackingCalls.metrics`."""
        optimizer = self.optimizer
        if optimizer is None:
            return {}
        values = {"lr": float(optimizer.param_groups[0]["lr"])}
        if self.session.last_norm is not None:
            values["grad_norm"] = float(self.session.last_norm)
        if self.resolved.precision == "fp16":
            values |= {"loss_scale": optimizer.loss_scale, "skipped_steps": optimizer.skipped_in_a_row}
        return values

    def watch_gradients(self) -> None:
        """Note in `reached` from now on when gradients come, so that a loss needs not say which models it is of."""
        if self.watches:
            return
        self.watches = True
        self.window.plans_ahead = False

        def note(_: Tensor) -> None:
            self.reached = True

        for p in self.parameters:
            p.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]

    def clip(self, given: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor | None:
        """Clip the coming step; None if none of the `given` tensors is trained here. See `Session.clip`.

        Raises:
            ConfigError: the configuration's `gradient_clipping` is another number.
        """
        if self.optimizer is None:
            return None
        stepped: Sequence[nn.Parameter] = self.parameters
        if self.session.left_out:
            idle = set(map(id, self.session.left_out))
            stepped = [p for p in stepped if id(p) not in idle]
        only: list[Tensor] | None = None
        if not given or len(given) != len(stepped) or not all(map(is_, given, stepped)):  # else model.parameters()
            ids = {id(p) for p in given}
            counted = sum(id(p) in ids for p in stepped)
            if not counted:
                return None
            only = None if counted == len(stepped) else list(given)
        self._refuse_other_clipping(max_norm)
        return self.optimizer.clip(max_norm, norm_type=norm_type, only=only)

    def _refuse_other_clipping(self, max_norm: float) -> None:
        entry = self.resolved.tree.get("gradient_clipping")
        if entry is None or not entry.origin.typed_by_user or max_norm in (float("inf"), entry.value):
            return
        where = f"clip_grad_norm_(max_norm={max_norm})"
        message = f"{max_norm} in code, but {entry.value} at {entry.origin.where}"
        fix = "Write the same value in both, or auto in the file."
        raise ConfigError([Problem(where, "gradient_clipping", message, fix)])
