"""One prepared model: from the configuration and the loop's facts to a session, its optimizer and its schedules."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zero_plugin.accumulation import AccumulationWindow
from zero_plugin.config.document import Document
from zero_plugin.config.launch_settings import launch_settings
from zero_plugin.errors import ConfigError, LoopError, Problem
from zero_plugin.optimizers import describe_optimizer
from zero_plugin.placeholders import DummyOptim, DummyScheduler
from zero_plugin.prepared import PreparedOptimizer, PreparedScheduler
from zero_plugin.probe.model import probe_model
from zero_plugin.resolve.facts import Facts, OptimizerFacts, SchedulerFacts
from zero_plugin.resolve.resolve import resolve
from zero_plugin.resolve.resolved import Resolved
from zero_plugin.run_record import describe_run, keep_record
from zero_plugin.schedules import build_schedule, preview_schedule
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
        parameters: of the module, listed once: walking a module takes longer than clipping a small one.
        given_optimizer: what the user passed to `prepare`.
        optimizer: what the user got for it; None for a model that is not trained.
    """

    session: Session
    facts: Facts
    resolved: Resolved
    parameters: tuple[nn.Parameter, ...]
    given_optimizer: Optimizer | DummyOptim | None
    optimizer: PreparedOptimizer | None

    def is_of_model(self, model: Any) -> bool:
        """Whether `model` is this one, prepared or the user's own module."""
        return model is self.session.model or model is self.session.module

    def is_of_optimizer(self, optimizer: Any) -> bool:
        """Whether `optimizer` is this one: as given, as prepared, or the torch object that runs."""
        known = (self.given_optimizer, self.optimizer, self.session.optimizer)
        return any(optimizer is candidate for candidate in known if candidate is not None)

    def clip(self, given: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor | None:
        """Clip the coming step; None if none of the `given` tensors is trained here. See `Session.clip`.

        Raises:
            ConfigError: the configuration's `gradient_clipping` is another number.
        """
        if self.optimizer is None:
            return None
        ids = {id(p) for p in given}
        trained = [p for p in self.parameters if p.requires_grad]
        counted = sum(id(p) in ids for p in trained)
        if not counted:
            return None
        self._refuse_other_clipping(max_norm)
        only = None if counted == len(trained) else list(given)
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
    window: AccumulationWindow,
    model: nn.Module,
    optimizer: Optimizer | DummyOptim | None,
    schedules: Sequence[Any],
    say: Callable[[str], None],
) -> Training:
    """Resolve the configuration for `model` and build its session.

    Args:
        document: what was asked for.
        facts: of the loop and the machine; those of the model, the optimizer and the schedule are added here.
        strategy: builds the session.
        processes: this process and its peers.
        window: counts the micro-batches of the loop.
        model: the user's module.
        optimizer: the user's optimizer or placeholder; None for a model that is not trained.
        schedules: the schedules and placeholders of the same `prepare`.
        say: prints a line once.

    Raises:
        ConfigError: see `resolve`.
        LoopError: the optimizer holds parameters that are not the model's.
    """
    if isinstance(optimizer, Optimizer):
        _refuse_foreign_parameters(model, optimizer)
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
    session = strategy.build_session(SessionRequest(model, optimizer, resolved, real), processes)
    session.follow_window(lambda: window.next_backward_ends)
    window.steps = resolved.accumulation
    window.restart()
    prepared = None if optimizer is None else PreparedOptimizer(session, window)
    if prepared is not None and resolved.scheduler is not None:
        _say_learning_rate(prepared, resolved, facts.loop.batches_per_epoch, say)
        if not schedules:
            # A section whose schedule the loop never asked for still is what the user wrote.
            prepared.call_after_step(build_schedule(resolved.scheduler, prepared.optimizer).step)
            say("the configuration's schedule steps by itself, since no scheduler was prepared")
    parameters = tuple(session.module.parameters())
    return Training(session, facts, resolved, parameters, optimizer, prepared)


def prepare_schedule(
    training: Training, schedule: Any, document: Document, processes: Processes, say: Callable[[str], None]
) -> PreparedScheduler:
    """The schedule on the training's running optimizer, a placeholder replaced by what the configuration describes."""
    optimizer = training.optimizer
    assert optimizer is not None, "a schedule is found by its optimizer"
    if not isinstance(schedule, DummyScheduler):
        by_process = training.resolved.scheduler_counts == "processes" and not training.facts.split_batches
        return PreparedScheduler(schedule, optimizer, times=training.facts.machine.processes if by_process else 1)
    if schedule.lr_scheduler_callable is not None:
        return PreparedScheduler(schedule.lr_scheduler_callable(optimizer.optimizer), optimizer, times=1)
    if training.facts.scheduler is None or not training.facts.scheduler.placeholder:  # prepared after its model
        told = training.resolved.said_aloud
        training.facts = replace(training.facts, scheduler=schedule.describe())
        training.resolved = resolve(document, training.facts)
        _tell(document, training.facts, training.resolved, processes, say, told)
    assert training.resolved.scheduler is not None, "resolution gives every placeholder a section"
    return PreparedScheduler(build_schedule(training.resolved.scheduler, optimizer.optimizer), optimizer, times=1)


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
    optimizer: PreparedOptimizer, resolved: Resolved, batches_per_epoch: int | None, say: Callable[[str], None]
) -> None:
    assert resolved.scheduler is not None
    steps = None if batches_per_epoch is None else -(-batches_per_epoch // resolved.accumulation)
    points = preview_schedule(resolved.scheduler, [float(group["lr"]) for group in optimizer.param_groups], steps)
    if points:
        shown = ", ".join(f"{point.lr:.3g} {point.label} (step {point.step})" for point in points)
        epoch = "" if steps is None else f"; one epoch is {steps} optimizer steps"
        say(f"{resolved.scheduler.type}: learning rate {shown}{epoch}")


def _refuse_foreign_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    own = {id(p) for p in model.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = sum(id(p) not in own for p in held)
    if foreign:
        raise LoopError(
            f"prepare() got an optimizer of which {foreign} of {len(held)} parameters are not the model's.\n"
            "Build the optimizer from model.parameters() of the model in the same call, after every change to it."
        )


def _describe(optimizer: Optimizer | DummyOptim) -> OptimizerFacts:
    return optimizer.describe() if isinstance(optimizer, DummyOptim) else describe_optimizer(optimizer)
