"""Prepares one model: resolves its configuration, builds its session, and wraps its optimizer and schedulers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zero_plugin.config.document import Document
from zero_plugin.config.launch_settings import launch_settings
from zero_plugin.config.placeholders import DummyOptim, DummyScheduler
from zero_plugin.config.resolve.facts import (
    Facts,
    LoopFacts,
    OptimizerFacts,
    Resolved,
    SchedulerFacts,
    SchedulerSection,
)
from zero_plugin.config.resolve.resolve import resolve
from zero_plugin.config.run_files import keep_record
from zero_plugin.data.active import LoaderProgress
from zero_plugin.distributed.processes import Processes
from zero_plugin.errors import ConfigError, LoopError
from zero_plugin.long_context.transformers_models import share_model
from zero_plugin.loop.memory_check import (
    Prediction,
    check_memory,
    check_memory_without_zero,
    peak_bytes,
    watch_memory,
)
from zero_plugin.loop.optimizer import AcceleratedOptimizer
from zero_plugin.loop.scheduler import AcceleratedScheduler, describe_counting, own_steps
from zero_plugin.loop.training import Pair, Training, parameters_left_out
from zero_plugin.loop.window import Window
from zero_plugin.plan.model_source import probe_model
from zero_plugin.plan.run_plan import local_processes, plan_open_fields, predict_memory
from zero_plugin.strategies.base import SessionRequest, Strategy
from zero_plugin.strategies.torch_optimizers import CurveLR, build_scheduler, describe_optimizer

_log = logging.getLogger(__name__)


def start_training(
    document: Document,
    facts: Facts,
    strategy: Strategy,
    processes: Processes,
    window: Window,
    pair: Pair,
    peek: Callable[[], Any],
    **how: bool,
) -> Training:
    """Resolve the configuration for a model and build its session.

    Args:
        document: the configuration as it was given.
        facts: facts about the loop and the machine; those about the model, optimizer and schedulers are added here.
        strategy: builds the session.
        processes: this process and its peers.
        window: the default accumulation window, for models without an optimizer.
        pair: the user's module, with its optimizer and schedulers.
        peek: returns an example batch; None if there is none.
        **how: `is_placed` and `only_evaluates` of `SessionRequest`.

    Raises:
        ConfigError: see `resolve` and `plan_open_fields`.
        ConfigError: also where processes are to share samples, and the model cannot; see `share_model`.
        MachineError, StrategyError: memory does not suffice; see `check_memory` and `check_memory_without_zero`.
    """
    model, optimizer, schedulers = pair
    facts = _with_pair(replace(facts, model=probe_model(model)), optimizer, schedulers)
    peak_before = peak_bytes(processes.device)
    facts, activations = plan_open_fields(document, facts, model, peek, processes)
    resolved = resolve(document, facts)
    _log_resolved(resolved, processes)
    stage = strategy.zero_stage(resolved)
    strategy.remove_leftover_files(resolved, processes)
    check_memory(model, resolved, stage, facts, processes)
    predicted = None
    if stage is None:
        views = strategy.handlers.ddp is not None and strategy.handlers.ddp.gradient_as_bucket_view
        predicted = check_memory_without_zero(document, model, resolved, facts, peek, processes, gradient_views=views)
    elif activations is not None:
        predicted = predict_memory(model, resolved, stage, facts, processes, activations)
    real = tuple(s for s in schedulers if isinstance(s, LRScheduler))
    left_out = _find_left_out(model, optimizer)
    if processes.shared_by > 1:  # from here on its forward is that of a group of processes
        share_model(model, document)
    session = strategy.build_session(SessionRequest(model, optimizer, resolved, real, **how), processes)
    session.left_out = left_out
    parameters = tuple(p for p in session.module.parameters() if p.requires_grad)
    training = Training(session, facts, resolved, window, parameters)
    if predicted is not None:
        before = peak_before if facts.loop.micro_batch else None  # else the plan had to guess the micro-batch size
        training.prediction = Prediction(predicted, local_processes(processes), processes.device, before)
    session.follow_window(lambda: training.reduces_each_batch or training.window.next_backward_ends)
    return training


def add_optimizer(
    training: Training,
    document: Document,
    strategy: Strategy,
    processes: Processes,
    pair: Pair,
) -> None:
    """Add the pair's optimizer to a model that was prepared without one.

    Raises:
        ConfigError: see `resolve`.
        LoopError: see `Strategy.add_optimizer`; or parameters that were frozen in `prepare` now require gradients.
    """
    model, optimizer, schedulers = pair
    known = {id(p) for p in training.parameters}
    if any(p.requires_grad and id(p) not in known for p in model.parameters()):
        raise LoopError(
            f"prepare() got the optimizer of the {type(model).__name__} in a later call than the model, of which some "
            "parameters were frozen then.\nPass them in one call, or set requires_grad of all before the first call."
        )
    logged = training.resolved.logged
    training.facts = _with_pair(training.facts, optimizer, schedulers)
    training.resolved = resolve(document, training.facts)
    _log_resolved(training.resolved, processes, logged)
    real = tuple(s for s in schedulers if isinstance(s, LRScheduler))
    training.session.left_out = _find_left_out(model, optimizer)
    strategy.add_optimizer(training.session, SessionRequest(model, optimizer, training.resolved, real))


def wrap_optimizer(
    training: Training,
    given: Optimizer | DummyOptim,
    held: AcceleratedOptimizer | None,
    progress: LoaderProgress,
    schedulers: Sequence[Any],
) -> AcceleratedOptimizer:
    """Create the `AcceleratedOptimizer` of a session that has an optimizer.

    Args:
        training: the prepared model.
        given: the optimizer that was passed to `prepare`.
        held: the `AcceleratedOptimizer` that an earlier `prepare` returned for it, or None.
        progress: the running loops over prepared loaders.
        schedulers: its schedulers in this `prepare` call.
    """
    training.window = Window(training.resolved.accumulation, training.session, progress)
    assert training.session.optimizer is not None, "the session has just been given one"
    optimizer = AcceleratedOptimizer(training.session.optimizer) if held is None else held
    optimizer.run_in(training.window)
    training.session.follow_zero_grad(optimizer.zero_grad)
    training.given_optimizer, training.optimizer = given, optimizer
    if training.prediction is not None:
        watch_memory(training.session, optimizer, training.prediction)
    for scheduler in optimizer.schedulers:  # those of earlier `prepare` calls
        _log_learning_rate(scheduler, training.resolved, training.facts)
        _warn_of_counting(training, scheduler)
    section = training.resolved.scheduler
    if section is not None and not schedulers and not optimizer.schedulers:
        # The configuration has a scheduler section, but the script prepared no scheduler.
        training.remove_scheduler = _step_by_itself(section, optimizer)
        _log_learning_rate(optimizer.schedulers[-1], training.resolved, training.facts)
        _log.info("the configuration's scheduler advances with each optimizer step, since no scheduler was prepared")
    return optimizer


def prepare_scheduler(
    training: Training,
    scheduler: Any,
    document: Document,
    processes: Processes,
    *,
    step_with_optimizer: bool = True,
    built_before: bool = False,
) -> AcceleratedScheduler:
    """Create the `AcceleratedScheduler` for a scheduler, or for what the configuration describes for a placeholder.

    Args:
        training: the model whose optimizer it drives.
        scheduler: the scheduler or placeholder of the script.
        document: the configuration as it was given.
        processes: this process and its peers.
        step_with_optimizer: see `AcceleratedScheduler`.
        built_before: whether it was built before the loader was prepared.
    """
    optimizer = training.optimizer
    assert optimizer is not None, "the model was found by its optimizer"
    by_process = training.resolved.scheduler_counts == "processes" and not training.facts.split_batches
    counted = training.facts.machine.counted if by_process else 1
    _join_scheduler(training, scheduler, document, processes)
    if not isinstance(scheduler, DummyScheduler):
        prepared = AcceleratedScheduler(scheduler, optimizer, step_with_optimizer, times=counted)
    elif scheduler.lr_scheduler_callable is not None:
        real = scheduler.lr_scheduler_callable(optimizer.optimizer)
        prepared = AcceleratedScheduler(real, optimizer, step_with_optimizer, times=1)
    else:
        assert training.resolved.scheduler is not None, "resolution gives every placeholder a section"
        real = build_scheduler(training.resolved.scheduler, optimizer.optimizer)
        typed = counted if scheduler.total_num_steps is not None else 1  # a section's numbers are optimizer steps
        prepared = AcceleratedScheduler(real, optimizer, step_with_optimizer, times=1, typed_per_step=typed)
    _log_learning_rate(prepared, training.resolved, training.facts)
    _warn_of_counting(training, prepared, built_before=built_before)
    return prepared


def _find_left_out(model: nn.Module, optimizer: Optimizer | DummyOptim | None) -> list[nn.Parameter]:
    """See `Session.left_out`; it is logged."""
    if optimizer is None or not (left_out := parameters_left_out(optimizer, model)):
        return []
    trainable = sum(p.requires_grad for p in model.parameters())
    _log.info(
        f"{len(left_out)} of the {trainable} trainable parameters of the {type(model).__name__} are in no optimizer: "
        "their gradients are computed, but never applied or clipped; requires_grad_(False) before prepare() avoids "
        "computing them"
    )
    return left_out


def _step_by_itself(section: SchedulerSection, optimizer: AcceleratedOptimizer) -> Callable[[], None]:
    """Advance the section's scheduler with each optimizer step; the returned function undoes all of it."""
    settings = [{name: deepcopy(group[name]) for name in group if name != "params"} for group in optimizer.param_groups]
    scheduler = AcceleratedScheduler(build_scheduler(section, optimizer.optimizer), optimizer, times=1)
    optimizer.call_after_step(scheduler.step)

    def take_back() -> None:
        optimizer.stop_calling(scheduler.step)
        optimizer.schedulers.remove(scheduler)
        for group, before in zip(optimizer.param_groups, settings, strict=True):
            for name in group.keys() - before.keys() - {"params"}:
                del group[name]
            group.update(before)

    return take_back


def _join_scheduler(training: Training, scheduler: Any, document: Document, processes: Processes) -> None:
    """Resolve the configuration again if a scheduler is prepared in a later call than its optimizer.

    Raises:
        ConfigError: the configuration describes another scheduler.
        LoopError: the configuration's scheduler has already advanced.
    """
    placeholder = isinstance(scheduler, DummyScheduler) and scheduler.lr_scheduler_callable is None
    known = training.facts.scheduler
    if (
        placeholder
        and known is not None
        and known.placeholder
        and training.optimizer is not None
        and training.optimizer.schedulers
    ):
        raise LoopError("prepare() got a second DummyScheduler of one optimizer; use what it returned for the first.")
    if known is not None and (known.placeholder or not placeholder):
        return
    logged = training.resolved.logged
    facts = replace(training.facts, scheduler=scheduler.describe() if placeholder else SchedulerFacts())
    resolved = resolve(document, facts)
    if training.remove_scheduler is not None:
        if training.optimizer is not None and training.optimizer.applied_steps:
            raise LoopError(
                f"prepare() got a {type(scheduler).__name__} after optimizer steps in which the configuration's "
                "scheduler has already advanced; prepare it before the first step."
            )
        training.remove_scheduler()
        training.remove_scheduler = None
    training.facts, training.resolved = facts, resolved
    _log_resolved(resolved, processes, logged)


def _with_pair(facts: Facts, optimizer: Optimizer | DummyOptim | None, schedulers: Sequence[Any]) -> Facts:
    placeholder = next((s for s in schedulers if isinstance(s, DummyScheduler)), None)
    return replace(
        facts,
        optimizer=None if optimizer is None else _describe(optimizer),
        scheduler=placeholder.describe() if placeholder else SchedulerFacts() if schedulers else None,
    )


def _log_resolved(resolved: Resolved, processes: Processes, logged: Sequence[str] = ()) -> None:
    """Log the resolved values that affect the training, and where the complete configuration is written."""
    for line in resolved.logged:
        if line not in logged:
            _log.info(line)
    if processes.rank == 0:
        log_dir = launch_settings(resolved.document).log_dir
        _log.info(keep_record(resolved.record, log_dir, os.environ))


def _log_learning_rate(scheduler: AcceleratedScheduler, resolved: Resolved, facts: Facts) -> None:
    batches = facts.loop.batches_per_epoch
    epoch = None if batches is None else -(-batches // resolved.accumulation)
    line = scheduler.describe(resolved.scheduler, facts.scheduler, epoch)
    if line is not None:
        _log.info(line)


def _warn_of_counting(training: Training, scheduler: AcceleratedScheduler, *, built_before: bool = False) -> None:
    """Warn if the length of the scheduler only fits the other value of `scheduler_counts`."""
    facts, real = training.facts, scheduler.scheduler
    by_process = training.resolved.scheduler_counts == "processes"
    name, length = type(real).__name__, own_steps(real)
    if isinstance(
        real, CurveLR
    ):  # a section's own numbers are optimizer steps, a placeholder's depend on `scheduler_counts`
        name, length = "DummyScheduler", None if facts.scheduler is None else facts.scheduler.total_num_steps
    elif scheduler.times != (facts.machine.counted if by_process else 1):
        return  # `lr_scheduler_callable` built it, or it counts calls: `scheduler_counts` has no effect
    if length is None or facts.split_batches:
        return
    accumulation = training.resolved.accumulation
    warning = describe_counting(name, length, facts, accumulation, by_process=by_process, built_before=built_before)
    if warning is not None:
        _log.info(warning)


def join_loaders(training: Training, loop: LoopFacts, document: Document, *, surely_trains: bool) -> None:
    """Check the configuration of a model that was prepared before its loader, now that the loader is known.

    Args:
        training: the model.
        loop: facts about the loaders.
        document: the configuration as it was given.
        surely_trains: whether the loader is certainly not one for evaluation; otherwise problems are only logged.

    Raises:
        ConfigError: the loader contradicts the configuration.
        LoopError: with the loader, the configuration results in another number of micro-batches per step.
    """
    if training.facts.loop != LoopFacts():
        return
    facts, problem = replace(training.facts, loop=loop), None
    unsure = "if this DataLoader is not for evaluation"
    try:
        resolved = resolve(document, facts)
    except ConfigError as error:
        if surely_trains:
            raise
        problem = str(error)
    else:
        before, now = training.window.steps, resolved.accumulation
        if before == now:
            for line in resolved.logged:
                if line not in training.resolved.logged:
                    _log.info(line if surely_trains else f"{unsure}: {line}")
            training.facts, training.resolved = facts, resolved
            for scheduler in training.optimizer.schedulers if training.optimizer is not None else ():
                _warn_of_counting(training, scheduler, built_before=True)
            return
        problem = (
            f"train_batch_size was resolved to gradient_accumulation_steps {before} before the DataLoader was "
            f"prepared; with it, the number is {now}.\nPass the loader to prepare() with the model, or before it; or "
            "write gradient_accumulation_steps."
        )
        if surely_trains:
            raise LoopError(problem)
    _log.info(f"{unsure}: {problem}")


def _describe(optimizer: Optimizer | DummyOptim) -> OptimizerFacts:
    return optimizer.describe() if isinstance(optimizer, DummyOptim) else describe_optimizer(optimizer)
