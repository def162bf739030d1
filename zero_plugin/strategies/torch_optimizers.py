"""Build torch optimizers and learning-rate schedulers from a configuration's sections.
They compute the same updates and learning rates as DeepSpeed does for the same sections.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from zero_plugin.config.keys import CLIPPING
from zero_plugin.config.resolve.facts import OptimizerFacts, OptimizerSection, SchedulerSection
from zero_plugin.config.schema import OPTIMIZER_DEFAULTS, SCHEDULER_DEFAULTS, SCHEDULER_REQUIRED
from zero_plugin.errors import ConfigError, Problem

_ONLY_DEEPSPEED = ("lamb", "muon", "muadam", "muadamw", "musgd")
# DeepSpeed's own classes, by name: only the DeepSpeed strategy may import them.
_DEEPSPEED_CLASSES = {
    "deepspeedcpuadam": "adam",
    "fusedadam": "adam",
    "deepspeedcpulion": "lion",
    "fusedlion": "lion",
    "deepspeedcpuadagrad": "adagrad",
}


class Lion(Optimizer):
    """Lion (arXiv:2302.06675, algorithm 2): a step of size `lr` along the sign of interpolated momentum.

    It equals DeepSpeed's kernels except if the interpolated momentum is exactly 0 (the row of a token that never
    occurred). Then this class, like the paper, does not change the weight. DeepSpeed's CPU kernel adds -lr, and its
    CUDA kernel +lr.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        betas: weights of the momentum in the update and in the next momentum. The defaults are DeepSpeed's.
        weight_decay: decoupled: weights shrink by `lr * weight_decay` each step.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply one update; with a closure, return its loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                momentum = state["exp_avg"]
                direction = momentum.mul(beta1).add_(parameter.grad, alpha=1 - beta1).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                momentum.mul_(beta2).add_(parameter.grad, alpha=1 - beta2)
        return loss


def build_optimizer(section: OptimizerSection, params: Iterable[Any]) -> Optimizer:
    """Build the torch optimizer that computes the same updates as DeepSpeed's for a section.

    Args:
        section: the type as in DeepSpeed (`Adam` is AdamW unless `adam_w_mode` is false) and its arguments; missing
            ones have DeepSpeed's defaults.
        params: parameters or parameter groups; the options of a group override those of the section.

    Raises:
        ConfigError: the type or an argument has no equivalent in torch.
    """
    kind = section.type.lower()
    arguments = {**OPTIMIZER_DEFAULTS.get(kind, {}), **section.params}
    groups = list(params)
    if "max_grad_norm" in arguments:
        _refuse("optimizer.params.max_grad_norm", "this key has no effect.", f"Write {CLIPPING.name} instead.")
    if kind in _ONLY_DEEPSPEED:
        _refuse("optimizer.type", f"{section.type} exists in DeepSpeed only.", "Train with DeepSpeed, or write AdamW.")
    build: Callable[..., Optimizer]
    if kind in ("adam", "adamw", "lion", "adagrad"):
        others: dict[str, Callable[..., Optimizer]] = {"lion": Lion, "adagrad": torch.optim.Adagrad}
        build = others[kind] if kind in others else _adam_class(kind, arguments)
        _drop_state_precision(arguments, groups)
    else:
        named = getattr(torch.optim, section.type, None)
        if not (isinstance(named, type) and issubclass(named, Optimizer)):
            fix = "Write AdamW, Adam, SGD, RMSprop, Adagrad, Lion, or an exact class name of torch.optim."
            _refuse(
                "optimizer.type", f"{section.type} is neither an optimizer of DeepSpeed nor one of torch.optim.", fix
            )
        build = named
    if "betas" in arguments:
        arguments["betas"] = tuple(arguments["betas"])
    try:
        return build(groups, **arguments)
    except (TypeError, ValueError) as error:
        _refuse("optimizer.params", str(error), f"Write the arguments of {section.type}.", error)


def _adam_class(kind: str, arguments: dict[str, Any]) -> type[Optimizer]:
    """Return Adam's or AdamW's class. Remove DeepSpeed's own arguments from `arguments`; honour or refuse each."""
    decoupled = arguments.pop("adam_w_mode", True) or kind == "adamw"
    arguments.pop("torch_adam", None)  # torch's Adam is used in any case
    if not arguments.pop("bias_correction", True):
        fix = "Train with DeepSpeed, or remove the key."
        _refuse("optimizer.params.bias_correction", "false: torch's Adam always corrects its bias.", fix)
    return torch.optim.AdamW if decoupled else torch.optim.Adam


def _drop_state_precision(arguments: dict[str, Any], groups: list[Any]) -> None:
    """Drop `fp32_optimizer_states`; refuse true for 16-bit parameters: torch keeps states in the parameters' dtype."""
    if not arguments.pop("fp32_optimizer_states", False):
        return
    members = [p for item in groups for p in (item["params"] if isinstance(item, dict) else [item])]
    tensors = [p for member in members for p in (member if isinstance(member, list | tuple) else [member])]
    if any(isinstance(p, Tensor) and p.dtype != torch.float32 for p in tensors):
        fix = "Build the model in fp32, and set the dtype of computation by mixed_precision."
        _refuse(
            "optimizer.params.fp32_optimizer_states",
            "true, but the parameters are not fp32, and torch's states have their dtype.",
            fix,
        )


def describe_optimizer(optimizer: Optimizer) -> OptimizerFacts:
    """Return the facts about a torch optimizer for resolution: its algorithm, default options and learning rates."""
    name = type(optimizer).__name__.lower()
    name = _DEEPSPEED_CLASSES.get(name, name)
    # A wrapper that does not call Optimizer.__init__ may have no defaults.
    given = {key: _plain(value) for key, value in getattr(optimizer, "defaults", {}).items()}
    decoupled = given.get("decoupled_weight_decay") or getattr(optimizer, "adam_w_mode", False)
    if name == "adam" and decoupled:
        name = "adamw"
    lrs = tuple(float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups)
    return OptimizerFacts(name=name, given=given, group_lrs=lrs)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _refuse(key: str, message: str, fix: str, cause: Exception | None = None) -> NoReturn:
    section = key.partition(".")[0]
    raise ConfigError([Problem(f"the {section} section", key, message, fix)]) from cause


Betas = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """A learning-rate schedule as functions of the number of applied optimizer steps.

    Attributes:
        lrs: the learning rate of each parameter group.
        betas: Adam's betas of each group; None if the schedule does not change momentum.
        warmup_steps: the number of steps until the peak; 0 without warm-up.
        total_steps: the number of steps until the end; None if there is no end.
        goes_on: whether training is meant to continue after `total_steps`.
    """

    lrs: Callable[[int], list[float]]
    betas: Callable[[int], list[Betas]] | None = None
    warmup_steps: int = 0
    total_steps: int | None = None
    goes_on: bool = False


def describe_curve(section: SchedulerSection, group_lrs: Sequence[float]) -> Curve:
    """Return the curve that DeepSpeed's engine applies for `section`: optimizer step k uses `lrs(k)`.

    DeepSpeed sets the lowest value when it builds a scheduler. It first advances the scheduler, to step 0, *after* the
    first optimizer step. The scheduler's own index is therefore k − 1, and a warm-up repeats its first value. OneCycle
    and LRRangeTest use k. `warmup_num_steps: 0`, which DeepSpeed refuses, starts at the peak.

    Args:
        section: type and parameters; missing ones have DeepSpeed's defaults.
        group_lrs: the optimizer's own learning rate of each parameter group.

    Raises:
        ConfigError: a parameter is unknown, missing or invalid.
    """
    params = {**SCHEDULER_DEFAULTS[section.type], **section.params}
    if params.pop("last_batch_iteration", -1) != -1:
        _refuse("scheduler.params.last_batch_iteration", "a scheduler is resumed by load_state.", "Remove the key.")
    missing = sorted(SCHEDULER_REQUIRED[section.type] - {*params})
    unknown = sorted({*params} - {*SCHEDULER_DEFAULTS[section.type]} - SCHEDULER_REQUIRED[section.type])
    if missing or unknown:
        key = (missing or unknown)[0]
        legal = ", ".join(sorted({*SCHEDULER_DEFAULTS[section.type], *SCHEDULER_REQUIRED[section.type]}))
        state = "is required" if missing else "is not a parameter"
        _refuse(f"scheduler.params.{key}", f"{state} of {section.type}.", f"Its parameters: {legal}.")
    return CURVES[section.type](params, list(group_lrs))


def _warmup(params: Mapping[str, Any], lrs: list[float]) -> Curve:
    """Rise from `warmup_min_lr` to `warmup_max_lr`, then stay, or fall linearly to 0 at `total_num_steps` if given."""
    steps, rise = _rise(params)
    total: int | None = params.get("total_num_steps")
    peak = params["warmup_max_lr"]
    lowest = _per_group(params["warmup_min_lr"], lrs, "warmup_min_lr")
    highest = list(lrs) if peak is None else _per_group(peak, lrs, "warmup_max_lr")

    def height(step: int) -> float:
        index = step - 1
        if step == 0 or index < steps:
            return rise(step)
        if total is None:
            return 1.0
        return min(1.0, max(0.0, (total - index) / max(1.0, total - steps)))

    def at(step: int) -> list[float]:
        return [low + (high - low) * height(step) for low, high in zip(lowest, highest, strict=True)]

    return Curve(at, warmup_steps=steps, total_steps=total)


def _warmup_cosine_lr(params: Mapping[str, Any], lrs: list[float]) -> Curve:
    """Rise from `warmup_min_ratio` to 1, then fall along a half cosine to `cos_min_ratio`, times each group's rate."""
    steps, rise = _rise(params)
    total, floor, lowest = params["total_num_steps"], params["cos_min_ratio"], params["warmup_min_ratio"]

    def ratio(step: int) -> float:
        index = step - 1
        if step == 0 and steps > 0:
            return 0.0  # not warmup_min_ratio: DeepSpeed's scheduler has not started
        if index < steps and steps > 0:
            return float(lowest + rise(step) * (1.0 - lowest))
        progress = min(1.0, (index - steps + 1) / max(1, total - steps))
        return float(max(0.0, floor + (1.0 - floor) * (1 + math.cos(math.pi * progress)) / 2))

    return Curve(lambda step: [lr * ratio(step) for lr in lrs], warmup_steps=steps, total_steps=total)


def _rise(params: Mapping[str, Any]) -> tuple[int, Callable[[int], float]]:
    """Return the number of warm-up steps, and a function from a step to the fraction (0 to 1) of the rise."""
    configured, kind = params["warmup_num_steps"], params["warmup_type"]
    if configured < 0:
        _refuse("scheduler.params.warmup_num_steps", f"{configured} is negative.", "Write 0 for no warm-up.")
    if kind not in ("log", "linear"):
        _refuse("scheduler.params.warmup_type", f"{kind!r} is not a type of warm-up.", "Write log or linear.")
    if configured == 0:
        return 0, lambda _: 1.0
    steps = max(2, configured)  # DeepSpeed's minimum, to divide by a positive logarithm

    def fraction(step: int) -> float:
        index = max(0, step - 1)
        return math.log(index + 1) / math.log(steps) if kind == "log" else index / steps

    return steps, fraction


def _one_cycle(params: Mapping[str, Any], lrs: list[float]) -> Curve:
    """Go up and down once between two learning rates (momentum in reverse), then decay; arXiv:1803.09820."""
    first = float(params["cycle_first_step_size"])
    second = first if params["cycle_second_step_size"] is None else float(params["cycle_second_step_size"])
    if first <= 0 or second < 0:
        _refuse(
            "scheduler.params.cycle_first_step_size",
            f"{first:g} up and {second:g} down are not a cycle.",
            "Write steps above 0.",
        )
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
        position = step % total  # for integer sizes an integer: rounding cannot drop a stair
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
            return [(a, _ONE_CYCLE_BETA2) for a in lively]  # DeepSpeed starts momentum at the other end of the cycle
        if step - 1 < total:
            return [(b - (b - a) * scale(step), _ONE_CYCLE_BETA2) for a, b in zip(lively, calm, strict=True)]
        return [(b * decay(step, mom_rate), _ONE_CYCLE_BETA2) for b in calm]

    cycles = betas if params["cycle_momentum"] else None
    return Curve(at, cycles, warmup_steps=int(first), total_steps=int(total), goes_on=True)


def _lr_range_test(params: Mapping[str, Any], lrs: list[float]) -> Curve:
    """Grow from `lr_range_test_min_lr` by `step_rate` of it every `step_size` steps."""
    size, rate = params["lr_range_test_step_size"], params["lr_range_test_step_rate"]
    if size <= 0:
        _refuse("scheduler.params.lr_range_test_step_size", f"{size} is not above 0.", "Write a number of steps.")
    lowest = _per_group(params["lr_range_test_min_lr"], lrs, "lr_range_test_min_lr")
    staircase = params["lr_range_test_staircase"]

    def at(step: int) -> list[float]:
        interval = float(math.floor(step / size)) if staircase else step / size
        return [low * (1 + rate * interval) for low in lowest]

    return Curve(at)


def _per_group(value: Any, lrs: Sequence[float], key: str) -> list[float]:
    """Return one number for each group, from a number for all or a list."""
    if not isinstance(value, list | tuple):
        return [float(value)] * len(lrs)
    if len(value) != len(lrs):
        _refuse(
            f"scheduler.params.{key}",
            f"{len(value)} values for {len(lrs)} parameter groups.",
            "Write one number, or one per group.",
        )
    return [float(v) for v in value]


_ONE_CYCLE_BETA2 = 0.99  # DeepSpeed replaces Adam's second beta too

CURVES: dict[str, Callable[[Mapping[str, Any], list[float]], Curve]] = {
    "WarmupLR": _warmup,
    "WarmupDecayLR": _warmup,
    "WarmupCosineLR": _warmup_cosine_lr,
    "OneCycle": _one_cycle,
    "LRRangeTest": _lr_range_test,
}


class CurveLR(LRScheduler):
    """A learning-rate scheduler that sets the learning rates (and betas) of all groups according to a `Curve`.

    Args:
        optimizer: the optimizer whose `param_groups` it changes.
        curve: the values by step.
    """

    def __init__(self, optimizer: Optimizer, curve: Curve) -> None:
        self.curve = curve
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        """Return the learning rate of each group at the current step."""
        return list(self.curve.lrs(self.last_epoch))

    def step(self, epoch: int | None = None) -> None:
        """Advance by one applied optimizer step, or to step `epoch`."""
        super().step(epoch)
        self._apply_betas()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps. The curve itself comes from the configuration."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a saved step, and set the values of the groups immediately."""
        self.last_epoch = int(state_dict["last_epoch"])
        self._step_count = self.last_epoch + 1
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        self._apply_betas()

    def _apply_betas(self) -> None:
        if self.curve.betas is not None:
            for group, betas in zip(self.optimizer.param_groups, self.curve.betas(self.last_epoch), strict=True):
                group["betas"] = betas


def build_scheduler(section: SchedulerSection, optimizer: Optimizer) -> LRScheduler:
    """Build the scheduler of `section`. Every applied step has the same learning rate as in DeepSpeed's engine.

    Args:
        section: one of DeepSpeed's five types, or a class of `torch.optim.lr_scheduler` by its exact name.
        optimizer: torch's optimizer, whose groups get the learning rate of the first step.

    Raises:
        ConfigError: the type or a parameter is unknown, missing or invalid.
    """
    if section.type in CURVES:
        lrs = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        curve = describe_curve(section, lrs)
        if curve.betas is not None and "betas" not in optimizer.defaults:
            name = type(optimizer).__name__
            warnings.warn(f"OneCycle does not change momentum: {name} has no betas.", stacklevel=2)
            curve = Curve(curve.lrs, None, curve.warmup_steps, curve.total_steps)
        return CurveLR(optimizer, curve)
    build = getattr(lr_scheduler, section.type, None)
    if not (isinstance(build, type) and issubclass(build, LRScheduler)):
        message = f"{section.type} is neither a scheduler of DeepSpeed nor one of torch.optim.lr_scheduler."
        fix = f"Write one of {', '.join(CURVES)}, or an exact class name such as CosineAnnealingLR."
        _refuse("scheduler.type", message, fix)
    try:
        return build(optimizer, **section.params)
    except (TypeError, ValueError) as error:
        _refuse(
            "scheduler.params", str(error), f"Write the arguments of torch.optim.lr_scheduler.{section.type}.", error
        )
