"""The learning rate at every optimizer step, for the five schedules that DeepSpeed's configuration can name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zero_plugin.errors import ConfigError, Problem
from zero_plugin.resolve.defaults import SCHEDULER_DEFAULTS, SCHEDULER_REQUIRED
from zero_plugin.resolve.resolved import SchedulerSection

__all__ = ["CURVES", "Curve", "describe_curve"]

Betas = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """A schedule as functions of the number of optimizer steps already applied.

    Attributes:
        lrs: learning rate of each parameter group.
        betas: Adam's betas of each group; None where the schedule leaves momentum alone.
        warmup_steps: applied steps until the peak; 0 for no warm-up.
        total_steps: applied steps until the end, None where it has none.
        goes_on: whether a loop is meant to go on after `total_steps`.
    """

    lrs: Callable[[int], list[float]]
    betas: Callable[[int], list[Betas]] | None = None
    warmup_steps: int = 0
    total_steps: int | None = None
    goes_on: bool = False


def describe_curve(section: SchedulerSection, group_lrs: Sequence[float]) -> Curve:
    """The curve that DeepSpeed's engine applies for `section`: the value used by optimizer step k is `lrs(k)`.

    DeepSpeed sets the lowest value when a schedule is built and first advances it to its step 0 *after* the first
    optimizer step, so its own index is k − 1 and a warm-up repeats its first value. OneCycle and LRRangeTest count k.
    `warmup_num_steps: 0`, which DeepSpeed refuses, starts at the peak.

    Args:
        section: type and parameters; absent ones take DeepSpeed's defaults.
        group_lrs: the optimizer's own learning rate of each parameter group.

    Raises:
        ConfigError: a parameter is unknown, missing or impossible.
    """
    params = {**SCHEDULER_DEFAULTS[section.type], **section.params}
    if params.pop("last_batch_iteration", -1) != -1:
        raise _error("last_batch_iteration", "a schedule is resumed by load_state.", "Remove the key.")
    missing = sorted(SCHEDULER_REQUIRED[section.type] - {*params})
    unknown = sorted({*params} - {*SCHEDULER_DEFAULTS[section.type]} - SCHEDULER_REQUIRED[section.type])
    if missing or unknown:
        key = (missing or unknown)[0]
        legal = ", ".join(sorted({*SCHEDULER_DEFAULTS[section.type], *SCHEDULER_REQUIRED[section.type]}))
        state = "is required" if missing else "is not a parameter"
        raise _error(key, f"{state} of {section.type}.", f"Its parameters: {legal}.")
    return CURVES[section.type](params, list(group_lrs))


def _warmup_lr(params: Mapping[str, Any], lrs: list[float]) -> Curve:
    return _warmup(params, lrs, total=None)


def _warmup_decay_lr(params: Mapping[str, Any], lrs: list[float]) -> Curve:
    return _warmup(params, lrs, total=params["total_num_steps"])


def _warmup(params: Mapping[str, Any], lrs: list[float], total: int | None) -> Curve:
    """Rise from `warmup_min_lr` to `warmup_max_lr`, then stay, or fall linearly to 0 at `total`."""
    steps, rise = _rise(params)
    peak = params["warmup_max_lr"]
    lowest = _per_group(params["warmup_min_lr"], lrs, "warmup_min_lr")
    highest = list(lrs) if peak is None else _per_group(peak, lrs, "warmup_max_lr")

    def share(step: int) -> float:
        index = step - 1
        if step == 0 or index < steps:
            return rise(step)
        if total is None:
            return 1.0
        return min(1.0, max(0.0, (total - index) / max(1.0, total - steps)))

    def at(step: int) -> list[float]:
        return [low + (high - low) * share(step) for low, high in zip(lowest, highest, strict=True)]

    return Curve(at, warmup_steps=steps, total_steps=total)


def _warmup_cosine_lr(params: Mapping[str, Any], lrs: list[float]) -> Curve:
    """Rise from `warmup_min_ratio` to 1, then fall along a half cosine to `cos_min_ratio`, times each group's own."""
    steps, rise = _rise(params)
    total, floor, lowest = params["total_num_steps"], params["cos_min_ratio"], params["warmup_min_ratio"]

    def ratio(step: int) -> float:
        index = step - 1
        if step == 0 and steps > 0:
            return 0.0  # not warmup_min_ratio: DeepSpeed's schedule has not begun
        if index < steps and steps > 0:
            return float(lowest + rise(step) * (1.0 - lowest))
        progress = min(1.0, (index - steps + 1) / max(1, total - steps))
        return float(max(0.0, floor + (1.0 - floor) * (1 + math.cos(math.pi * progress)) / 2))

    return Curve(lambda step: [lr * ratio(step) for lr in lrs], warmup_steps=steps, total_steps=total)


def _rise(params: Mapping[str, Any]) -> tuple[int, Callable[[int], float]]:
    """Steps of the warm-up, and its share of the way from 0 to 1."""
    asked, kind = params["warmup_num_steps"], params["warmup_type"]
    if asked < 0:
        raise _error("warmup_num_steps", f"{asked} is negative.", "Write 0 for no warm-up.")
    if kind not in ("log", "linear"):
        raise _error("warmup_type", f"{kind!r} is no way to warm up.", "Write log or linear.")
    if asked == 0:
        return 0, lambda _: 1.0
    steps = max(2, asked)  # DeepSpeed's minimum: its logarithm has to be positive

    def share(step: int) -> float:
        index = max(0, step - 1)
        return math.log(index + 1) / math.log(steps) if kind == "log" else index / steps

    return steps, share


def _one_cycle(params: Mapping[str, Any], lrs: list[float]) -> Curve:
    """Up and down once between two learning rates (momentum against them), then decay; arXiv:1803.09820."""
    first = float(params["cycle_first_step_size"])
    second = first if params["cycle_second_step_size"] is None else float(params["cycle_second_step_size"])
    if first <= 0 or second < 0:
        raise _error("cycle_first_step_size", f"{first:g} up and {second:g} down are no cycle.", "Write steps above 0.")
    up_stairs, down_stairs = params["cycle_first_stair_count"], params["cycle_second_stair_count"]
    down_stairs = up_stairs if down_stairs is None else down_stairs
    decay_every, lr_rate, mom_rate = params["decay_step_size"], params["decay_lr_rate"], params["decay_mom_rate"]
    low, high = (_per_group(params[f"cycle_{end}_lr"], lrs, f"cycle_{end}_lr") for end in ("min", "max"))
    calm, lively = (_per_group(params[f"cycle_{end}_mom"], lrs, f"cycle_{end}_mom") for end in ("max", "min"))
    total = first + second

    def scale(step: int) -> float:
        x = 1.0 + step / total - math.floor(1 + step / total)
        rising = x <= first / total
        stairs = up_stairs if rising else down_stairs
        if stairs <= 0:
            return x / (first / total) if rising else (x - 1) / (first / total - 1)
        position = step % total  # whole steps, so that rounding cannot drop a stair
        height = position * stairs / first if position <= first else (total - position) * stairs / second
        return float(math.floor(height) / stairs)

    def decay(step: int, rate: float) -> float:
        return 1.0 if decay_every == 0 else float(1 + rate * (step - total) / decay_every)

    def at(step: int) -> list[float]:
        if step - 1 < total:
            return [a + (b - a) * scale(step) for a, b in zip(low, high, strict=True)]
        return [a / decay(step, lr_rate) for a in low]

    def betas(step: int) -> list[Betas]:
        if step == 0:
            return [(a, _ONE_CYCLE_BETA2) for a in lively]  # DeepSpeed starts at the other end of the cycle
        if step - 1 < total:
            return [(b - (b - a) * scale(step), _ONE_CYCLE_BETA2) for a, b in zip(lively, calm, strict=True)]
        return [(b * decay(step, mom_rate), _ONE_CYCLE_BETA2) for b in calm]

    cycles = betas if params["cycle_momentum"] else None
    return Curve(at, cycles, warmup_steps=int(first), total_steps=int(total), goes_on=True)


def _lr_range_test(params: Mapping[str, Any], lrs: list[float]) -> Curve:
    """Grow from `lr_range_test_min_lr` by `step_rate` of it every `step_size` steps."""
    size, rate = params["lr_range_test_step_size"], params["lr_range_test_step_rate"]
    if size <= 0:
        raise _error("lr_range_test_step_size", f"{size} is not above 0.", "Write a number of steps.")
    lowest = _per_group(params["lr_range_test_min_lr"], lrs, "lr_range_test_min_lr")
    staircase = params["lr_range_test_staircase"]

    def at(step: int) -> list[float]:
        interval = float(math.floor(step / size)) if staircase else step / size
        return [low * (1 + rate * interval) for low in lowest]

    return Curve(at)


def _per_group(value: Any, lrs: Sequence[float], key: str) -> list[float]:
    """One number for all groups, or a list with one for each."""
    if not isinstance(value, list | tuple):
        return [float(value)] * len(lrs)
    if len(value) != len(lrs):
        raise _error(
            key, f"{len(value)} values for {len(lrs)} parameter groups.", "Write one number, or one per group."
        )
    return [float(v) for v in value]


def _error(key: str, message: str, fix: str) -> ConfigError:
    return ConfigError([Problem("the scheduler section", f"scheduler.params.{key}", message, fix)])


_ONE_CYCLE_BETA2 = 0.99  # DeepSpeed replaces Adam's second beta too

CURVES: dict[str, Callable[[Mapping[str, Any], list[float]], Curve]] = {
    "WarmupLR": _warmup_lr,
    "WarmupDecayLR": _warmup_decay_lr,
    "WarmupCosineLR": _warmup_cosine_lr,
    "OneCycle": _one_cycle,
    "LRRangeTest": _lr_range_test,
}
