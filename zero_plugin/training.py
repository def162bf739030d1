"""One prepared model: from the configuration and the loop's facts to a session, its optimizer and its schedules."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zero_plugin.accumulation import AccumulationWindow, Epoch
from zero_plugin.config.document import Document
from zero_plugin.config.launch_settings import launch_settings
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.optimizers import describe_optimizer
from zero_plugin.pairing import Pair
from zero_plugin.placeholders import DummyOptim, DummyScheduler
from zero_plugin.prepared import PreparedOptimizer, PreparedScheduler
from zero_plugin.probe.model import probe_model
from zero_plugin.resolve.facts import Facts, OptimizerFacts, SchedulerFacts
from zero_plugin.resolve.resolve import resolve
from zero_plugin.resolve.resolved import Resolved
from zero_plugin.run_record import describe_run, keep_record
from zero_plugin.schedules import build_schedule
from zero_plugin.strategies.base import Session, SessionRequest, Strategy
from zero_plugin.strategies.processes import Processes

__all__ = ["Training", "prepare_schedule", "start_training"]


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
        reached: whether a gradient has come since it was last set to False; see `watch_gradients`.
    """

    session: Session
    facts: Facts
    resolved: Resolved
    window: AccumulationWindow
    parameters: tuple[nn.Parameter, ...]
    given_optimizer: Optimizer | DummyOptim | None
    optimizer: PreparedOptimizer | None
    reached: bool = False
    watches: bool = False

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
        ids = {id(p) for p in given}
        counted = sum(id(p) in ids for p in self.parameters)
        if not counted:
            return None
        self._refuse_other_clipping(max_norm)
        only = None if counted == len(self.parameters) else list(given)
        return self.optimizer.clip(max_norm, norm_type=norm_type, only=only)

    def _refuse_other_clipping(self, max_norm: float) -> None:
        entry = self.resolved.tree.get("gradient_clipping")
        if entry is None or not entry.origin.typed_by_user or max_norm in (float("inf"), entry.value):
            return
        where = f"clip_grad_norm_(max_norm={max_norm})"
        message = f"{max_norm} in code, but {entry.value} at {entry.origin.where}"
        fix = "Write the same value in both, or auto in the file."
        raise ConfigError([Problem(where, "gradient_clipping", message, fix)])


def start_training(
    document: Document,
    facts: Facts,
    strategy: Strategy,
    processes: Processes,
    running_epoch: Callable[[], Epoch | None],
    pair: Pair,
    say: Callable[[str], None],
) -> Training:
    """Resolve the configuration for a model and build its session.

    Args:
        document: what was asked for.
        facts: of the loop and the machine; those of the model, the optimizer and the schedule are added here.
        strategy: builds the session.
        processes: this process and its peers.
        running_epoch: the prepared loader that is being iterated.
        pair: the user's module, with its optimizer and schedules.
        say: prints a line.

    Raises:
        ConfigError: see `resolve`.
    """
    model, optimizer, schedules = pair
    placeholder = next((s for s in schedules if isinstance(s, DummyScheduler)), None)
    facts = replace(
        facts,
        model=probe_model(model),
        optimizer=None if optimizer is None else _describe(optimizer),
        scheduler=placeholder.describe() if placeholder else SchedulerFacts() if schedules else None,
    )
    resolved = resolve(document, facts)
    _tell(document, facts, resolved, processes, say)
    real = tuple(s for s in schedules if isinstance(s, LRScheduler))
    session = strategy.build_session(SessionRequest(model, optimizer, resolved, real, say), processes)
    window = AccumulationWindow(resolved.accumulation, running_epoch)
    session.follow_window(lambda: window.next_backward_ends)
    prepared = None if optimizer is None else PreparedOptimizer(session, window)
    if prepared is not None and resolved.scheduler is not None and not schedules:
        # A section whose schedule the loop never asked for still is what the user wrote.
        schedule = PreparedScheduler(build_schedule(resolved.scheduler, prepared.optimizer), prepared, times=1)
        prepared.call_after_step(schedule.step)
        _say_learning_rate(schedule, resolved, facts, say)
        say("the configuration's schedule steps by itself, since no scheduler was prepared")
    parameters = tuple(p for p in session.module.parameters() if p.requires_grad)
    return Training(session, facts, resolved, window, parameters, optimizer, prepared)


def prepare_schedule(
    training: Training, schedule: Any, document: Document, processes: Processes, say: Callable[[str], None]
) -> PreparedScheduler:
    """The schedule on the training's running optimizer, a placeholder replaced by what the configuration describes."""
    optimizer = training.optimizer
    assert optimizer is not None, "a schedule is found by its optimizer"
    by_process = training.resolved.scheduler_counts == "processes" and not training.facts.split_batches
    counted = training.facts.machine.processes if by_process else 1
    if not isinstance(schedule, DummyScheduler):
        prepared = PreparedScheduler(schedule, optimizer, times=counted)
    elif schedule.lr_scheduler_callable is not None:
        prepared = PreparedScheduler(schedule.lr_scheduler_callable(optimizer.optimizer), optimizer, times=1)
    else:
        if training.facts.scheduler is None or not training.facts.scheduler.placeholder:  # prepared after its model
            told = training.resolved.said_aloud
            training.facts = replace(training.facts, scheduler=schedule.describe())
            training.resolved = resolve(document, training.facts)
            _tell(document, training.facts, training.resolved, processes, say, told)
        assert training.resolved.scheduler is not None, "resolution gives every placeholder a section"
        real = build_schedule(training.resolved.scheduler, optimizer.optimizer)
        typed = counted if schedule.total_num_steps is not None else 1  # a section's numbers are optimizer steps
        prepared = PreparedScheduler(real, optimizer, times=1, typed_per_step=typed)
    _say_learning_rate(prepared, training.resolved, training.facts, say)
    return prepared


def _tell(
    document: Document,
    facts: Facts,
    resolved: Resolved,
    processes: Processes,
    say: Callable[[str], None],
    told: Sequence[str] = (),
) -> None:
    """Say what was chosen for the user and changes training, and where the whole configuration is kept."""
    for line in resolved.said_aloud:
        if line not in told:
            say(line)
    if processes.rank == 0:
        log_dir = launch_settings(document).log_dir
        say(keep_record(describe_run(document, resolved, facts), log_dir, os.environ))


def _say_learning_rate(
    schedule: PreparedScheduler, resolved: Resolved, facts: Facts, say: Callable[[str], None]
) -> None:
    batches = facts.loop.batches_per_epoch
    epoch = None if batches is None else -(-batches // resolved.accumulation)
    line = schedule.describe(resolved.scheduler, facts.scheduler, epoch)
    if line is not None:
        say(line)


def _describe(optimizer: Optimizer | DummyOptim) -> OptimizerFacts:
    return optimizer.describe() if isinstance(optimizer, DummyOptim) else describe_optimizer(optimizer)
