"""Placeholders for the optimizer and the learning-rate scheduler that the configuration describes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, NoReturn

from zero_plugin.config.resolve.facts import OptimizerFacts, SchedulerFacts
from zero_plugin.errors import ConfigError, LoopError, Problem


class Unset:
    """Type of `UNSET`, the default of omitted arguments. A real default could contradict the configuration."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "UNSET"

    def __bool__(self) -> bool:
        return False


UNSET: Final = Unset()


class DummyOptim:
    """A placeholder for the optimizer that the configuration's `optimizer` section describes.

    Args:
            params: parameters, with or without names, or parameter groups (dicts), as for a torch optimizer. A
                generator is read once, in the constructor.
            lr: learning rate; fills `optimizer.params.lr`.
            weight_decay: fills `optimizer.params.weight_decay`.
            **kwargs: every other argument of that optimizer (`betas`, `eps`, …); each fills its own open field.
    """

    def __init__(
        self, params: Iterable[Any], lr: float | Unset = UNSET, weight_decay: float | Unset = UNSET, **kwargs: Any
    ) -> None:
        self.params = [_without_names(item) for item in params]
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameters as torch's list of groups. A group has `lr` only if it was given."""
        groups = self.params if self.params and isinstance(self.params[0], dict) else [{"params": self.params}]
        return [{**self._given(), **group} for group in groups]

    def describe(self) -> OptimizerFacts:
        """Return the facts for resolution: only the given arguments.

        Raises:
            ConfigError: a learning rate is not a number.
        """
        lrs = tuple(_as_rate(group["lr"]) for group in self.param_groups if "lr" in group)
        complete = len(lrs) == len(self.param_groups)
        return OptimizerFacts(given=self._given(), group_lrs=lrs if complete else (), placeholder=True)

    def _given(self) -> dict[str, Any]:
        arguments = {"lr": self.lr, "weight_decay": self.weight_decay, **self.kwargs}
        return {name: value for name, value in arguments.items() if value is not UNSET}

    def step(self, *_: object, **__: object) -> NoReturn:
        """Refuse: only the optimizer that `prepare` returns can step.

        Raises:
            LoopError: always.
        """
        raise LoopError(_unprepared("DummyOptim", "optimizer", "step"))

    def zero_grad(self, *_: object, **__: object) -> NoReturn:
        """Refuse, like `step`.

        Raises:
            LoopError: always.
        """
        raise LoopError(_unprepared("DummyOptim", "optimizer", "zero_grad"))


class DummyScheduler:
    """A placeholder for the learning-rate scheduler that the configuration's `scheduler` section describes.

    Args:
            optimizer: the optimizer or `DummyOptim` that uses the learning rate.
            total_num_steps: length of the complete schedule, counted as in `scheduler_counts`.
            warmup_num_steps: length of the warm-up, counted as in `scheduler_counts`.
            lr_scheduler_callable: builds the scheduler from the real optimizer; the configuration must then describe
                none.
            **kwargs: every other argument of that scheduler; each fills its own open field.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | Unset | None = UNSET,
        warmup_num_steps: int | Unset | None = UNSET,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs

    def describe(self) -> SchedulerFacts:
        """Return the facts for resolution: only the given arguments."""
        return SchedulerFacts(
            placeholder=self.lr_scheduler_callable is None,
            total_num_steps=None if isinstance(self.total_num_steps, Unset) else self.total_num_steps,
            warmup_num_steps=None if isinstance(self.warmup_num_steps, Unset) else self.warmup_num_steps,
            given=dict(self.kwargs),
        )

    def step(self, *_: object, **__: object) -> NoReturn:
        """Refuse: only the scheduler that `prepare` returns can step.

        Raises:
            LoopError: always.
        """
        raise LoopError(_unprepared("DummyScheduler", "scheduler", "step"))


def _without_names(item: Any) -> Any:
    """Return an item of `named_parameters()`, or a group of them, as `parameters()` would give it."""
    if isinstance(item, dict) and isinstance(item.get("params"), Iterable) and not hasattr(item["params"], "shape"):
        return {**item, "params": [_without_names(inner) for inner in item["params"]]}
    return item[1] if isinstance(item, tuple) else item


def _as_rate(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        fix = "Pass a number, e.g. lr=1e-3, or leave it out to take the configuration's."
        raise ConfigError([Problem("DummyOptim(…)", "lr", f"{value!r} is not a number", fix)]) from None


def _unprepared(name: str, variable: str, method: str) -> str:
    return (
        f"{variable}.{method}() was called on a {name}, a placeholder for the {variable} of the configuration. "
        f"Pass it through prepare and use the result: {variable} = accelerator.prepare({variable}), "
        "in the same call as the model."
    )
