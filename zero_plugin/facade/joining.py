"""Joins models, optimizers and schedules that come in one `prepare` call, or in several."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zero_plugin.config.document import Document
from zero_plugin.config.placeholders import DummyOptim, DummyScheduler
from zero_plugin.config.plugins import DataLoaderConfiguration, GradientAccumulationPlugin
from zero_plugin.config.resolve.facts import Facts, LoopFacts, Resolved
from zero_plugin.data.active import RunningLoops
from zero_plugin.data.adapter import DataLoaderAdapter
from zero_plugin.data.prepare import peek_batch
from zero_plugin.distributed.processes import Processes
from zero_plugin.errors import LoopError
from zero_plugin.loop.backward import FirstSteps
from zero_plugin.loop.optimizer import AcceleratedOptimizer
from zero_plugin.loop.prepare import add_optimizer, begin_steps, prepare_schedule, start_training
from zero_plugin.loop.scheduler import AcceleratedScheduler
from zero_plugin.loop.training import Pair, Training, holds_any, pair_models, refuse_closure
from zero_plugin.plan.run_facts import accelerator_kind, probe_machine
from zero_plugin.strategies.base import Session, Strategy
from zero_plugin.strategies.window import AccumulationWindow


class Joining:
    """What of the facade is prepared: models, with their optimizers, and optimizers that wait for theirs.

    Attributes:
        step_scheduler_with_optimizer: False: every call of a prepared schedule's `step` advances it once.
    """

    device: torch.device
    document: Document
    resolved: Resolved | None
    dataloader_config: DataLoaderConfiguration
    step_scheduler_with_optimizer: bool
    gradient_accumulation_plugin: GradientAccumulationPlugin
    _dataloaders: list[DataLoaderAdapter]
    _first_steps: FirstSteps
    _intended: int  # processes that the run is meant to have
    _loop: LoopFacts  # of the loaders prepared last
    _loose: AccumulationWindow  # of what is prepared without an optimizer
    _processes: Processes
    _say: Callable[[str], None]
    _strategy: Strategy
    _trained: list[Training]
    _trainings: list[Training]
    _untrained: list[Training]
    _unreturned: list[tuple[Any, AcceleratedOptimizer]]
    _leaving_files: list[Session]  # kept until they have removed them
    _waiting: list[AcceleratedOptimizer]  # for their models
    _window: AccumulationWindow  # of the model whose micro-batch runs, or ran last

    def _prepare_models(
        self,
        models: list[nn.Module],
        optimizers: list[Optimizer | DummyOptim],
        schedules: list[Any],
        ready: dict[int, Any],
        left: set[int],
        *,
        only_evaluates: bool,
    ) -> None:
        facts = Facts(
            loop=self._loop,
            machine=replace(
                probe_machine(accelerator_kind(self.device), self._processes.world_size), intended=self._intended
            ),
            split_batches=self.dataloader_config.split_batches,
            strategy=self._strategy.name,
        )
        following = {id(o): t for o in optimizers for t in self._trainings if holds_any(o, t.session.module)}
        own = [o for o in optimizers if id(o) not in following]
        if not models:
            for optimizer in own:
                ready[id(optimizer)] = self._held(optimizer) or self._hold(optimizer)
            own = []
        given = {id(o) for o in own}
        own += [
            held.optimizer
            for held in self._waiting
            if id(held.optimizer) not in given and any(holds_any(held.optimizer, model) for model in models)
        ]
        prepared_before = [training.session.module for training in self._trainings]
        for pair in pair_models(models, own, schedules, prepared_before):
            pair, held = self._with_held(pair, schedules)
            training = start_training(
                self.document,
                facts,
                self._strategy,
                self._processes,
                self._loose,
                pair,
                lambda: peek_batch(self._dataloaders),
                self._say,
                is_placed=id(pair.model) not in left,
                only_evaluates=only_evaluates,
            )
            training.reduces_each_batch = self.gradient_accumulation_plugin.sync_each_batch
            ready[id(pair.model)] = training.session.model
            self._add(training, pair, held, ready)
        for optimizer in optimizers:
            if (follower := following.get(id(optimizer))) is not None:
                self._follow(follower, optimizer, schedules, ready)

    def _follow(self, training: Training, optimizer: Any, schedules: list[Any], ready: dict[int, Any]) -> None:
        """Join an optimizer with a model that was prepared in an earlier call."""
        if training.optimizer is not None:
            raise LoopError(
                f"prepare() got another optimizer of the {type(training.session.module).__name__}; build one, with "
                "parameter groups."
            )
        (pair,) = pair_models([training.session.module], [optimizer], schedules, [])
        pair, held = self._with_held(pair, schedules)
        add_optimizer(training, self.document, self._strategy, self._processes, pair, self._say)
        self._untrained.remove(training)
        self._trainings.remove(training)
        self._add(training, pair, held, ready)

    def _with_held(self, pair: Pair, schedules: Iterable[Any]) -> tuple[Pair, AcceleratedOptimizer | None]:
        """The pair with the schedules of an optimizer that waited for the model, and what the script has for that."""
        held = self._held(pair.optimizer)
        if held is None:
            return pair, None
        self._waiting.remove(held)
        later = [schedule for schedule in schedules if schedule.optimizer is held]
        return pair._replace(schedules=(*(s.scheduler for s in held.schedules), *later, *pair.schedules)), held

    def _add(self, training: Training, pair: Pair, held: AcceleratedOptimizer | None, ready: dict[int, Any]) -> None:
        self._trainings.append(training)
        if training.session.leaves_files:
            self._leaving_files.append(training.session)
        self.resolved = training.resolved
        if pair.optimizer is None:
            self._untrained.append(training)
            return
        ready[id(pair.optimizer)] = begin_steps(
            training, pair.optimizer, held, self._running_loops(), pair.schedules, self._say
        )
        self._trained.append(training)
        self._window = training.window
        self._first_steps.begin()
        if len({trained.window.steps for trained in self._trained}) > 1:
            raise LoopError(
                "the trained models came out with different gradient_accumulation_steps; prepare the training loader "
                "with the first of them, or write the number into the configuration."
            )
        if len(self._trained) > 1:
            for trained in self._trained:
                trained.watch_gradients()

    def _hold(self, optimizer: Any) -> AcceleratedOptimizer:
        """What the script gets for an optimizer whose model is not prepared yet."""
        if isinstance(optimizer, DummyOptim):
            raise LoopError("prepare() got a DummyOptim without its model; pass both in the same call.")
        held = optimizer if isinstance(optimizer, AcceleratedOptimizer) else AcceleratedOptimizer(optimizer)
        held.run_in(self._strategy.hold_optimizer(held.optimizer, self._loose), self._loose)
        self._waiting.append(held)
        return held

    def _hold_for_schedule(self, optimizer: Any) -> AcceleratedOptimizer:
        """An optimizer that the script has not passed to `prepare`: its schedule came first."""
        refuse_closure(optimizer)
        held = self._hold(optimizer)
        if held is not optimizer:
            self._unreturned.append((optimizer, held))
        return held

    def _not_returned(self, optimizer: Any) -> AcceleratedOptimizer | None:
        """What the script gets for an optimizer that is prepared by now, since its schedule and its model came first.

        Where its model has not come, it is held like any other.
        """
        for index, (given, held) in enumerate(self._unreturned):
            if given is optimizer and not held.waits:
                del self._unreturned[index]
                return held
        return None

    def _held(self, optimizer: Any) -> AcceleratedOptimizer | None:
        """The one among those that wait that is, or stands for, `optimizer`."""
        return next((held for held in self._waiting if optimizer is held or optimizer is held.optimizer), None)

    def _may_follow(self, optimizer: AcceleratedOptimizer) -> bool:
        """Whether its model has been prepared without it."""
        return any(holds_any(optimizer, training.session.module) for training in self._untrained)

    def _prepare_schedule(self, schedule: Any, *, alone: bool, built_before: bool) -> AcceleratedScheduler:
        """The schedule on its optimizer; one that comes `alone` may come before that.

        `built_before`: no loader has been prepared for it to take its length from.
        """
        optimizer = schedule.optimizer
        for training in self._trained:
            if training.is_of_optimizer(optimizer):
                prepared = prepare_schedule(
                    training,
                    schedule,
                    self.document,
                    self._processes,
                    self._say,
                    step_with_optimizer=self.step_scheduler_with_optimizer,
                    built_before=built_before,
                )
                self.resolved = training.resolved
                return prepared
        held = self._held(optimizer)
        if isinstance(schedule, DummyScheduler) or not (held or (alone and isinstance(optimizer, Optimizer))):
            raise LoopError(
                f"prepare() got a {type(schedule).__name__} whose optimizer was not prepared; pass model, optimizer "
                "and scheduler together."
            )
        once = self.document.launch.value("scheduler_counts") == "steps" or self.dataloader_config.split_batches
        return AcceleratedScheduler(
            schedule,
            held or self._hold_for_schedule(optimizer),
            self.step_scheduler_with_optimizer,
            times=1 if once else self._intended,
        )

    def _new_window(self) -> AccumulationWindow:
        """The window of what is prepared without an optimizer."""
        asked = self.document.deepspeed.value("gradient_accumulation_steps")
        loops = self._running_loops()
        return AccumulationWindow(asked if isinstance(asked, int) else 1, loops.find_leader, loops.count_batch)

    def _running_loops(self) -> RunningLoops:
        """Those over prepared loaders, for one window."""
        return RunningLoops(ends_windows=self.gradient_accumulation_plugin.sync_with_dataloader)
