"""`AcceleratedScheduler`: `prepare` returns one for a learning-rate scheduler; it follows applied optimizer steps.

The `describe_*` functions make the log lines about a scheduler: its learning rates at the start, and whether its length
fits the loop.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import lr_scheduler

from zero_plugin.config.resolve.facts import Facts, SchedulerFacts, SchedulerSection
from zero_plugin.distributed.collectives import announce, num_processes
from zero_plugin.errors import CheckpointError
from zero_plugin.loop.optimizer import AcceleratedOptimizer
from zero_plugin.strategies.torch_optimizers import CURVES, CurveLR, describe_curve


class AcceleratedScheduler:
    """A prepared learning-rate scheduler: `step` advances it only if the optimizer applied a step since the last call.

    Args:
        scheduler: the torch scheduler.
        optimizers: the prepared optimizer that the scheduler drives, or several: then all must have applied a step.
        step_with_optimizer: if False, every call of `step` advances the scheduler once, independently of the optimizer.
        split_batches: the loader's batch size counts all processes' samples; then an applied step counts once.
        times: how many times the scheduler advances per applied step. None counts as Accelerate does: once for each
            process, or once with `split_batches`.
        typed_per_step: how many of the steps that the script counts correspond to one applied step; None is `times`.

    Attributes:
        length: compares the scheduler's length with the loop's.
        times: how many times the scheduler advances per applied step.
    """

    _is_accelerate_prepared = True  # Accelerate's mark; scripts look for it

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
        self._measures = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
        # ReduceLROnPlateau counts measurements, and each call has one, independently of `scheduler_counts`.
        self.times = 1 if self._measures or not step_with_optimizer else times
        self._applied = [optimizer.applied_steps for optimizer in self.optimizers]  # at the last call of `step`
        can_begin_again = isinstance(scheduler, lr_scheduler.LambdaLR) or _is_closed(scheduler)
        is_fresh = getattr(scheduler, "last_epoch", None) == 0
        self._beginning = _twin(scheduler)[0] if can_begin_again and is_fresh else None
        self.length = SchedulerLength(scheduler, self.times, typed_per_step or self.times)
        for optimizer in self.optimizers:
            optimizer.schedulers.append(self)
        if not step_with_optimizer and (driven := getattr(scheduler, "optimizer", None)) is not None:
            driven._opt_called = True  # otherwise torch warns that the scheduler steps before its optimizer

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance, unless an optimizer applied no step since the last call: inside a window, or after a skipped step.

        ReduceLROnPlateau receives every measurement.
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
                break  # OneCycleLR raises beyond its end, which several steps at a time could pass
            self.scheduler.step(*args, **kwargs)

    def describe(
        self, section: SchedulerSection | None, facts: SchedulerFacts | None, steps_per_epoch: int | None
    ) -> str | None:
        """Return the line about the learning rates to log at the start; see `describe_section`."""
        if isinstance(self.scheduler, CurveLR) and section is not None:
            rates = self.scheduler.base_lrs
            return describe_section(section, [float(rate) for rate in rates], facts, steps_per_epoch)
        return describe_torch_scheduler(self.scheduler, self.times, steps_per_epoch)

    def describe_end(self) -> str | None:
        """Return a line if the loop ended before the scheduler."""
        return self.length.at_end(self.get_last_lr()[0])

    @property
    def class_name(self) -> str:
        """The class name of the torch scheduler."""
        return type(self.scheduler).__name__

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each parameter group for the next step."""
        return [float(group["lr"]) for optimizer in self.optimizers[:1] for group in optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the torch scheduler."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the torch scheduler."""
        self.scheduler.load_state_dict(state_dict)
        self.length.resume(getattr(self.scheduler, "last_epoch", 0))  # a ChainedScheduler has none
        self._applied = [optimizer.applied_steps for optimizer in self.optimizers]

    def load_counted_anew(self, state_dict: dict[str, Any], factor: float | None) -> bool:
        """Load the state of a scheduler that counted its steps differently: advance to `factor` times its count.

        A copy is advanced from the beginning, because the scheduler's length may be different here.

        Returns:
            False if nothing was loaded. Reasons: the factor is not known; the scheduler had advanced before `prepare`;
            its class is the script's own; or its rates depend on more than its count.
        """
        count, groups = state_dict.get("last_epoch"), self.scheduler.optimizer.param_groups
        beginning = self._beginning
        if (
            beginning is None
            or factor is None
            or not isinstance(count, int)
            or len(groups) != len(beginning.optimizer.param_groups)
        ):
            return False
        twin, reached = _twin(beginning)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(round(count * factor)):
                twin.step()
        self.load_state_dict(twin.state_dict())
        for group, there in zip(groups, reached, strict=True):
            group.update({key: there[key] for key in ("lr", "momentum", "betas") if key in group and key in there})
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)


def load_schedulers(
    schedulers: Sequence[AcceleratedScheduler], saved: Mapping[str, Any], samples_per_step: int | None
) -> list[str]:
    """Load the states of a checkpoint, on any number of processes.

    A step of the saving run and a step of this run may have different numbers of samples, and may advance a scheduler a
    different number of times. The saved count is loaded if the advances per step, or per sample, are the same.
    Otherwise the scheduler is advanced to the same part of the training, in samples.

    Args:
        schedulers: as many as were saved.
        saved: the training's record: `schedules`, their `schedule_classes`, `schedules_advance` and `samples_per_step`.
        samples_per_step: samples of one step of this run; None if unknown.

    Returns:
        Phrases about states that could not be restored.

    Raises:
        CheckpointError: a scheduler does not accept the saved state, because another scheduler was saved.
    """
    lost = []
    before = saved.get("schedules_advance") or [scheduler.times for scheduler in schedulers]  # of earlier versions
    classes = saved.get("schedule_classes") or [scheduler.class_name for scheduler in schedulers]  # of earlier versions
    then = saved.get("samples_per_step")
    for scheduler, state, times, saved_class in zip(schedulers, saved["schedules"], before, classes, strict=True):
        here = scheduler.class_name
        factor = scheduler.times / times * then / samples_per_step if then and samples_per_step else None
        try:
            if saved_class != here:  # torch would load a part of the other class's state, and compute wrong rates
                if not scheduler.load_counted_anew(state, scheduler.times / times if factor is None else factor):
                    raise ValueError(f"it cannot be brought to the count of a {saved_class}")
                lost.append(f"the state of {saved_class}: {here} replaces it here, and continues at the same count")
            elif times == scheduler.times or factor == 1:
                scheduler.load_state_dict(state)
            elif not scheduler.load_counted_anew(state, factor):
                scheduler.load_state_dict(state)
                lost.append(
                    f"the position of {here}, which continues at its count: it advanced {times} times per optimizer "
                    f"step when it was saved, {scheduler.times} here (scheduler_counts)"
                )
        except (LookupError, AttributeError, TypeError, ValueError) as error:  # other parts, functions or lengths
            raise CheckpointError(
                f"the checkpoint has the state of a {saved_class}, but the {here} prepared here does not accept it "
                f"({type(error).__name__}: {error}).\nPrepare the same scheduler with the same parts, or use "
                "load_state(weights_only=True)."
            ) from error
    return lost


# The rates of torch's schedulers are computed by running a copy, which takes about 20 µs per step.
_MOST_SIMULATED = 20_000
_MOST_EPOCHS = 100  # a larger multiple is probably a coincidence: 10,000 steps are a multiple of many lengths
# Rates of these classes depend only on the step count. Running a copy of the script's own class or function could
# change the script's state.
_CLOSED = (
    lr_scheduler.ConstantLR,
    lr_scheduler.CosineAnnealingLR,
    lr_scheduler.CosineAnnealingWarmRestarts,
    lr_scheduler.ExponentialLR,
    lr_scheduler.LinearLR,
    lr_scheduler.MultiStepLR,
    lr_scheduler.OneCycleLR,
    lr_scheduler.PolynomialLR,
    lr_scheduler.StepLR,
)


def own_steps(scheduler: Any) -> int | None:
    """Return the number of its own steps after which a scheduler ends; None if it has no end, or the end is unknown."""
    if isinstance(scheduler, CurveLR):
        return None if scheduler.curve.goes_on else scheduler.curve.total_steps
    if isinstance(scheduler, lr_scheduler.OneCycleLR):
        return int(scheduler.total_steps)
    if isinstance(scheduler, lr_scheduler.CosineAnnealingLR):
        return int(scheduler.T_max)
    falls_to_zero = isinstance(scheduler, lr_scheduler.LinearLR) and not scheduler.end_factor
    if falls_to_zero or isinstance(scheduler, lr_scheduler.PolynomialLR):
        return int(scheduler.total_iters)
    if isinstance(scheduler, lr_scheduler.SequentialLR):
        last = own_steps(scheduler._schedulers[-1])
        return None if last is None else int(scheduler._milestones[-1]) + last
    if isinstance(scheduler, lr_scheduler.LambdaLR):
        # transformers' schedulers are partial functions with this keyword.
        total = getattr(scheduler.lr_lambdas[0], "keywords", {}).get("num_training_steps")
        return int(total) if isinstance(total, int | float) else None
    return None


class SchedulerLength:
    """A comparison of a scheduler's length with the loop's, in applied optimizer steps.

    Args:
        scheduler: the torch scheduler.
        times: how many times the scheduler advances per applied optimizer step.
        typed_per_step: how many of the steps that the script counts correspond to one applied optimizer step.
    """

    def __init__(self, scheduler: Any, times: int, typed_per_step: int) -> None:
        own = own_steps(scheduler)
        self._name = type(scheduler).__name__ if not isinstance(scheduler, CurveLR) else "the scheduler"
        self._times = times
        self._typed_per_step = typed_per_step
        self._steps = None if own is None else -(-own // times)
        self._taken = 0

    def resume(self, own_step: int) -> None:
        """Continue at this step of the scheduler's own count, after its state was loaded."""
        self._taken = -(-own_step // self._times)

    def count(self) -> str | None:
        """Count a step; return a line for the log at the first step beyond the end."""
        self._taken += 1
        if self._taken - 1 != self._steps:
            return None
        return (
            f"{self._name} is built for {self._steps} steps, but the loop continues: this was step {self._taken}. Make "
            f"the scheduler as long as the loop: epochs × len(prepared loader) ÷ accumulation{self._counting()}."
        )

    def at_end(self, rate: float) -> str | None:
        """Return a line if the loop ended before the scheduler, at the learning rate `rate`."""
        if self._steps is None or not 0 < self._taken < self._steps:
            return None
        return (
            f"{self._name} is built for {self._steps} steps, but the loop took {self._taken}: it ended at a learning "
            f"rate of {rate:.3g}. Make it {self._taken * self._typed_per_step} steps long{self._counting()}."
        )

    def _counting(self) -> str:
        per_step = self._typed_per_step
        return "" if per_step == 1 else f", counted {per_step} times per optimizer step (scheduler_counts: processes)"


def describe_section(
    section: SchedulerSection, rates: Sequence[float], facts: SchedulerFacts | None, steps_per_epoch: int | None
) -> str | None:
    """Return a line about the configuration's scheduler; None if its type is not one of DeepSpeed's.

    Args:
        section: the section, in optimizer steps.
        rates: the optimizer's own learning rate of each group.
        facts: facts about the DummyScheduler; its numbers may have been divided by the number of processes.
        steps_per_epoch: optimizer steps of one epoch; None if unknown.
    """
    if section.type not in CURVES:
        return None
    curve = describe_curve(section, rates)
    total = curve.total_steps or steps_per_epoch
    warm = curve.warmup_steps + (section.type != "OneCycle") if curve.warmup_steps else None
    line = _points(section.type, lambda step: curve.lrs(step)[0], warm, total, steps_per_epoch)
    typed = {
        name: getattr(facts, name)
        for name in ("total_num_steps", "warmup_num_steps")
        if name in section.params and getattr(facts, name, None) not in (None, section.params[name])
    }
    if typed and total is not None:  # the script's numbers were divided by the number of processes
        other = describe_curve(SchedulerSection(section.type, {**section.params, **typed}), rates)
        line += _other_end(total, curve.lrs(total)[0], other.lrs(total)[0])
    return line


def describe_counting(
    name: str, length: int, facts: Facts, accumulation: int, *, by_process: bool, built_before: bool
) -> str | None:
    """Return a warning if the length of a scheduler fits only the other value of `scheduler_counts`; otherwise None.

    A length fits if it is an integer number of epochs of a loader: of the prepared loader if an optimizer step counts
    once, of the given loader if an optimizer step counts once for each process. If the length fits both loaders, the
    scheduler is assumed to count the given loader only if it was built before the loader was prepared.

    Args:
        name: the name of the scheduler's class.
        length: the length in the script.
        facts: facts about the loop and the machine.
        accumulation: micro-batches per optimizer step.
        by_process: whether a scheduler advances once for each process per optimizer step.
        built_before: whether the scheduler was built before the loader was prepared.
    """
    given, prepared, processes = facts.loop.batches_given, facts.loop.batches_per_epoch, facts.machine.processes
    if given is None or prepared is None or given <= prepared or facts.machine.counted != processes:
        return None
    of_given, of_prepared = (_whole_epochs(length, batches, accumulation) for batches in (given, prepared))
    micro = "" if accumulation == 1 else f" ÷ gradient_accumulation_steps {accumulation}"
    if by_process and of_prepared and not of_given:
        return (
            f"warning: {name} is {length} steps long: {_epochs(of_prepared)} of the prepared loader, which has "
            f"{prepared} batches on each process{micro}. But scheduler_counts is processes: the scheduler advances "
            f"{processes} steps for each optimizer step, and ends after {-(-length // processes)}.\n"
            "Write scheduler_counts: steps into the config. Or build the scheduler from the loader's length before "
            f"prepare(), {given} batches."
        )
    if not by_process and of_given and (built_before or not of_prepared):
        ends = length * accumulation / prepared
        return (
            f"warning: {name} is {length} steps long: {_epochs(of_given)} of the loader before prepare(), "
            f"{given} batches{micro}. But the prepared loader has {prepared} batches on each process, and "
            "scheduler_counts is steps: the scheduler advances one step for each optimizer step, and ends after "
            f"{ends:.3g} epochs.\n"
            "Write scheduler_counts: processes into the config, or remove the key. Or build the scheduler from the "
            "length of the prepared loader."
        )
    return None


def _whole_epochs(steps: int, batches: int, accumulation: int) -> int | None:
    """Return how many epochs of a loader `steps` optimizer steps are, with any rounding; None if not an integer."""
    shorter, longer = batches // accumulation, -(-batches // accumulation)
    nearest = round(steps * accumulation / batches)
    exact = steps in (nearest * batches // accumulation, -(-nearest * batches // accumulation))
    found = [nearest] if exact else [steps // epoch for epoch in (longer, shorter) if epoch and steps % epoch == 0]
    return found[0] if found and 0 < found[0] <= _MOST_EPOCHS and shorter > 1 else None


def _epochs(count: int) -> str:
    return "1 epoch" if count == 1 else f"{count} epochs"


def describe_torch_scheduler(scheduler: Any, times: int, steps_per_epoch: int | None) -> str | None:
    """Return a line about a scheduler of the script; None if its learning rates cannot be predicted.

    Args:
        scheduler: a scheduler that has not advanced yet.
        times: how many times the scheduler advances per applied optimizer step.
        steps_per_epoch: optimizer steps of one epoch; None if unknown.
    """
    own = own_steps(scheduler)
    last = own if own is not None else None if steps_per_epoch is None else steps_per_epoch * times
    begun = getattr(scheduler, "last_epoch", 0) > 0  # a ChainedScheduler has none
    if last is None or last > _MOST_SIMULATED or begun or isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        return None
    if not _is_closed(scheduler):
        start = scheduler.optimizer.param_groups[0]["lr"]
        return _points(type(scheduler).__name__, lambda _: float(start), None, None, None) + _epoch(steps_per_epoch)
    # The last meaningful rate of OneCycleLR is at step `total_steps - 1`: several steps at a time do not pass it.
    rates = _simulate(scheduler, last - isinstance(scheduler, lr_scheduler.OneCycleLR))
    total = -(-last // times)
    peak = rates.index(max(rates))
    name = type(scheduler).__name__

    def rate(step: int) -> float:
        return rates[min(step * times, len(rates) - 1)]

    warm = -(-peak // times) if 0 < peak < last else None
    line = _points(name, rate, warm, total if own is not None else None, steps_per_epoch)
    return line + (_other_end(total, rate(total), rates[min(total, len(rates) - 1)]) if times > 1 else "")


def _points(
    name: str, rate: Callable[[int], float], warm: int | None, total: int | None, steps_per_epoch: int | None
) -> str:
    steps = {0: "start"}
    if total is not None:
        steps |= {total // 2: "middle", total: "end"}
    elif steps_per_epoch is not None:
        steps[steps_per_epoch] = "after one epoch"
    if warm is not None:
        steps[warm] = "after warm-up"
    shown = ", ".join(f"{rate(step):.3g} {steps[step]} (step {step})" for step in sorted(steps))
    return f"{name}: learning rate {shown}{_epoch(steps_per_epoch)}"


def _epoch(steps: int | None) -> str:
    return "" if steps is None else f"; one epoch is {steps} optimizer steps"


def _other_end(total: int, here: float, other: float) -> str:
    if math.isclose(here, other, rel_tol=1e-6, abs_tol=1e-15):
        return ""
    return (
        f"; scheduler_counts is processes, which ends at {here:.3g} in step {total}: "
        f"with scheduler_counts: steps it would be {other:.3g} there"
    )


def _is_closed(scheduler: Any) -> bool:
    """Return whether running a copy calls no code of the script."""
    kind = type(scheduler)
    if kind in (lr_scheduler.SequentialLR, lr_scheduler.ChainedScheduler):
        return all(map(_is_closed, scheduler._schedulers))
    if kind is lr_scheduler.LambdaLR:  # transformers' schedulers are partial objects of its own functions
        functions = [getattr(shape, "func", shape) for shape in scheduler.lr_lambdas]
        return all(str(getattr(f, "__module__", "")).startswith("transformers.") for f in functions)
    return kind in _CLOSED


def _simulate(scheduler: lr_scheduler.LRScheduler, steps: int) -> list[float]:
    """Return the first group's learning rate before each of `steps` steps and after the last, by running a copy."""
    twin, groups = _twin(scheduler)
    rates = [float(groups[0]["lr"])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(steps):
            twin.step()
            rates.append(float(groups[0]["lr"]))
    return rates


def _twin(scheduler: lr_scheduler.LRScheduler) -> tuple[lr_scheduler.LRScheduler, list[dict[str, Any]]]:
    """Copy a scheduler that has not advanced; return the copy and its parameter groups, which have no parameters."""
    optimizer: Any = torch.optim.SGD([torch.zeros(1)], lr=0.0)
    optimizer.param_groups = [
        copy.deepcopy({**{key: value for key, value in group.items() if key != "params"}, "params": [], "lr": rate})
        for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True)
    ]
    optimizer._opt_called = True
    return copy.deepcopy(scheduler, {id(scheduler.optimizer): optimizer}), optimizer.param_groups
