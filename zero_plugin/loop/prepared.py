"""`Prepared`: the models, optimizers, loaders and schedulers of a run, from one or several `prepare` calls."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from zero_plugin.config.placeholders import DummyOptim, DummyScheduler
from zero_plugin.config.resolve.facts import Facts, LoopFacts, Resolved
from zero_plugin.config.run_files import OutOfMemoryReport
from zero_plugin.config.tree import AUTO
from zero_plugin.data.active import RUNNING, LoaderProgress
from zero_plugin.data.dispatch import SliceFunction
from zero_plugin.data.loader import DataLoaderAdapter
from zero_plugin.data.prepare import peek_batch, prepare_loader
from zero_plugin.distributed.collective_check import collective
from zero_plugin.distributed.messages import working
from zero_plugin.errors import LoopError
from zero_plugin.loop.first_steps import FirstSteps
from zero_plugin.loop.memory_check import peak_bytes
from zero_plugin.loop.optimizer import AcceleratedOptimizer
from zero_plugin.loop.out_of_memory import FailedLoop, describe_out_of_memory
from zero_plugin.loop.prepare import add_optimizer, join_loaders, prepare_scheduler, start_training, wrap_optimizer
from zero_plugin.loop.run import Run
from zero_plugin.loop.same_everywhere import check_same_models
from zero_plugin.loop.scheduler import AcceleratedScheduler
from zero_plugin.loop.training import (
    Pair,
    Training,
    holds_any,
    pair_models,
    refuse_other_steps,
    refuse_uninitialized,
)
from zero_plugin.loop.window import Window
from zero_plugin.plan.run_plan import accelerator_kind, probe_loop, probe_machine, surely_train
from zero_plugin.strategies.base import Session
from zero_plugin.strategies.optimizer_only import UnpreparedOptimizer


class Prepared:
    """The models, optimizers, loaders and schedulers of one run.

    Args:
        run: the run.

    Attributes:
        trainings: every prepared model, in the order of `prepare`.
        trained: the models that have an optimizer.
        untrained: the other models.
        waiting: optimizers whose models are not prepared yet.
        dataloaders: the prepared loaders.
        resolved: the resolved configuration of the model that was prepared last; None before.
        default_window: counts the micro-batches while no model is prepared with its optimizer.
        window: the accumulation window of the current micro-batch, or of the last one.
        first_steps: checks the first backwards for mistakes.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.trainings: list[Training] = []
        self.trained: list[Training] = []
        self.untrained: list[Training] = []
        self.waiting: list[AcceleratedOptimizer] = []
        self.dataloaders: list[DataLoaderAdapter] = []
        self.resolved: Resolved | None = None
        self._unreturned: list[
            tuple[Any, AcceleratedOptimizer]
        ] = []  # the script's optimizers whose schedulers came first
        self._loop = LoopFacts()  # facts about the loaders that were prepared last
        self._was_freed = False  # whether `free` was called since the last `prepare`
        self.window = self.default_window = self._new_window()
        self.first_steps = FirstSteps(self.trainings, RUNNING)

    # ---- what is prepared --------------------------------------------------------------------------------------------

    @property
    def models(self) -> list[nn.Module]:
        """The prepared models, as the script calls them."""
        return [training.session.model for training in self.trainings]

    @property
    def optimizers(self) -> list[AcceleratedOptimizer]:
        """The optimizers of the trained models, then those whose models are not prepared yet."""
        return [*(t.optimizer for t in self.trained if t.optimizer is not None), *self.waiting]

    @property
    def schedulers(self) -> list[AcceleratedScheduler]:
        """The schedulers of all optimizers."""
        return [scheduler for optimizer in self.optimizers for scheduler in optimizer.schedulers]

    @property
    def windows(self) -> list[Window]:
        """All accumulation windows."""
        return [*self.untrained_windows, *(training.window for training in self.trained)]

    @property
    def untrained_windows(self) -> list[Window]:
        """The default window, then those of optimizers whose models are not prepared."""
        return [self.default_window, *(held.window for held in self.waiting)]

    def training_of(self, model: nn.Module) -> Training | None:
        """The entry of `model`, the prepared model or the user's own module; None if it is not prepared."""
        return next((training for training in self.trainings if training.is_of_model(model)), None)

    def session_of(self, model: nn.Module) -> Session | None:
        """The session that runs `model`; None if it is not prepared."""
        training = self.training_of(model)
        return None if training is None else training.session

    def measure(self) -> dict[str, float]:
        """Measurements of the last steps; all models but the first have their index appended to the names."""
        return {
            f"{name}_{number}" if number else name: value
            for number, training in enumerate(self.trained)
            for name, value in training.measure().items()
        }

    def settle(self) -> None:
        """Count the last step of each optimizer; see `AcceleratedOptimizer.settle`."""
        for training in self.trained:
            if training.optimizer is not None:
                training.optimizer.settle()

    def free(self) -> None:
        """Release everything that is prepared, and its memory."""
        self.settle()
        for training in self.trainings:
            if training.session.before_change is not None:
                training.session.before_change()
            training.session.close()
        for held in self.waiting:
            held.session.close()
        everything: tuple[list[Any], ...] = (
            *(self.trainings, self.trained, self.untrained, self._run.leaving_files),
            *(self.waiting, self._unreturned, self.dataloaders),
        )
        for prepared in everything:
            prepared.clear()
        self._run.background.memory.release()
        self._loop = LoopFacts()
        self.first_steps.begin()
        self._was_freed = True
        self.window = self.default_window = self._new_window()
        self.resolved = None
        gc.collect()
        torch.cuda.empty_cache()  # does nothing if CUDA was not used

    def describe_out_of_memory(self, error: BaseException) -> OutOfMemoryReport:
        """Describe an out-of-memory error, and whether the launcher may restart the run."""
        run, training = self._run, self.trained[0] if self.trained else None
        micro_batch = run.document.deepspeed.get("train_micro_batch_size_per_gpu")
        loop = FailedLoop(
            trains=training is not None,
            micro_batch=self._loop.micro_batch,
            accumulation=1 if training is None else training.window.steps,
            cut=run.micro_batches_per_loader_batch,
            is_open=micro_batch is not None and (micro_batch.value is AUTO or not micro_batch.origin.typed_by_user),
            decides=training is not None and training.window.is_decided,
            savings=() if training is None else run.strategy.savings(training.resolved),
            run=None if training is None or training.prediction is None else training.prediction.run,
            taken=peak_bytes(run.device) or 0,
        )
        return describe_out_of_memory(error, loop, run.device, run.processes.rank)

    # ---- prepare -----------------------------------------------------------------------------------------------------

    @collective("prepare", waits_for_all=True)
    def prepare(self, objects: Sequence[Any], left: set[int], *, only_evaluates: bool = False) -> tuple[Any, ...]:
        """The prepared objects, in the order of `objects`; collective. See `Accelerator.prepare`.

        Args:
            objects: models, optimizers, loaders and schedulers; other objects are returned unchanged.
            left: ids of the models and loaders that are not moved to this process's device.
            only_evaluates: whether the models are never trained.
        """
        self._run.follow_configuration()
        if self._was_freed:
            self._was_freed = False
            gc.collect()  # the old wrapper, which the script has released, still has hooks on the parameters
        ready: dict[int, Any] = {}
        loaders, models, optimizers, schedulers = self._sort(objects, ready)
        for optimizer in optimizers:
            refuse_other_steps(optimizer)
        for model in models:
            refuse_uninitialized(model)
        if self._run.processes.world_size > 1:
            check_same_models(models, optimizers)
        self._prepare_loaders(loaders, ready, left)
        self._prepare_models(models, optimizers, schedulers, ready, left, only_evaluates=only_evaluates)
        for scheduler in schedulers:
            alone = not (models or optimizers)
            ready[id(scheduler)] = self._prepare_scheduler(scheduler, alone=alone, built_before=bool(loaders))
        if self.resolved is not None and (models or schedulers):
            self._run.configurations.show(self.resolved.tree.nested(auto="auto"))
        for model in self.models:
            model._is_accelerate_prepared = True  # type: ignore[assignment]  # Accelerate's mark, which scripts look for
        return tuple(ready.get(id(o), o) for o in objects)

    def _sort(
        self, objects: Sequence[Any], ready: dict[int, Any]
    ) -> tuple[list[DataLoader[Any]], list[nn.Module], list[Optimizer | DummyOptim], list[Any]]:
        """The objects to prepare, by kind; `ready` gets the prepared objects of those that are known already."""
        kinds = (DataLoader, nn.Module, Optimizer | DummyOptim, LRScheduler | DummyScheduler)
        found: tuple[list[Any], list[Any], list[Any], list[Any]] = ([], [], [], [])
        for position, o in enumerate(objects):
            if (held := self._not_returned(o)) is not None:
                ready[id(o)] = held
                continue
            if self._is_prepared(o):
                if isinstance(o, AcceleratedOptimizer) and o.waits and self._may_follow(o):
                    found[2].append(o.optimizer)
                continue
            kind = next((index for index, kind in enumerate(kinds) if isinstance(o, kind)), None)
            if kind is not None:
                if any(o is other for other in objects[:position]):
                    raise LoopError(f"prepare() got one {type(o).__name__} twice; pass each object once.")
                found[kind].append(o)
        return found

    def _is_prepared(self, o: Any) -> bool:
        """Whether the object is a prepared one, which is returned unchanged.

        Raises:
            LoopError: the object was prepared before, and its prepared form is another object.
        """
        if isinstance(o, AcceleratedOptimizer):
            if o.waits and not any(o is held for held in self.waiting):  # the script constructed it
                self._hold(o)
            return True
        if isinstance(o, AcceleratedScheduler) or any(o is model for model in self.models):
            return True
        if isinstance(o, DataLoader):
            prepared = bool(getattr(o, "_is_accelerate_prepared", False))
            if prepared:
                self.prepare_loader(o)  # another Accelerator may have prepared it
            return prepared
        known = any(training.is_of_model(o) or training.is_of_optimizer(o) for training in self.trainings)
        if known or any(o is scheduler.scheduler for scheduler in self.schedulers):
            raise LoopError(
                f"prepare() got a {type(o).__name__} that is already prepared; use the object that it returned."
            )
        return False

    # ---- loaders -----------------------------------------------------------------------------------------------------

    def prepare_loader(
        self, loader: Any, *, is_placed: bool | None = None, slice_function: SliceFunction | None = None
    ) -> DataLoaderAdapter:
        """This process's part of a loader; see `Accelerator.prepare_data_loader`."""
        run, options = self._run, self._run.options
        loading = options.loading
        placed = options.device_placement if is_placed is None else is_placed
        prepared = prepare_loader(
            loader,
            rank=run.processes.data_parallel_rank,
            world_size=run.processes.data_parallel_size,
            shared_by=run.processes.shared_by,
            device=run.device if placed else None,
            even_batches=loading.even_batches,
            split_batches=loading.split_batches,
            shard_iterable=options.shard_iterable,
            dispatch_batches=loading.dispatch_batches,
            slice_fn=slice_function,
            use_seedable_sampler=loading.use_seedable_sampler,
            data_seed=loading.data_seed,
            non_blocking=loading.non_blocking,
            rng_types=options.rng_types,
            cut=run.micro_batches_per_loader_batch,
        )
        if not any(prepared is known for known in self.dataloaders):
            self.dataloaders.append(prepared)
        return prepared

    def _prepare_loaders(self, loaders: list[DataLoader[Any]], ready: dict[int, Any], left: set[int]) -> None:
        if not loaders:
            return
        for loader in loaders:
            ready[id(loader)] = self.prepare_loader(loader, is_placed=id(loader) not in left)
        self._loop = probe_loop(
            loaders,
            [ready[id(loader)] for loader in loaders],
            processes=self._run.processes.data_parallel_size,
            split_batches=self._run.options.loading.split_batches,
            cut=self._run.micro_batches_per_loader_batch,
        )
        for training in self.trained:
            is_shown = self.resolved is training.resolved
            join_loaders(training, self._loop, self._run.document, surely_trains=surely_train(loaders))
            if is_shown:
                self.resolved = training.resolved

    # ---- models with their optimizers --------------------------------------------------------------------------------

    def _prepare_models(
        self,
        models: list[nn.Module],
        optimizers: list[Optimizer | DummyOptim],
        schedulers: list[Any],
        ready: dict[int, Any],
        left: set[int],
        *,
        only_evaluates: bool,
    ) -> None:
        following = {id(o): t for o in optimizers for t in self.trainings if holds_any(o, t.session.module)}
        own = [o for o in optimizers if id(o) not in following]
        if not models:
            for optimizer in own:
                ready[id(optimizer)] = self._held(optimizer) or self._hold(optimizer)
            own = []
        given = {id(o) for o in own}
        own += [
            held.optimizer
            for held in self.waiting
            if id(held.optimizer) not in given and any(holds_any(held.optimizer, model) for model in models)
        ]
        facts = self._facts()
        prepared_before = [training.session.module for training in self.trainings]
        for pair in pair_models(models, own, schedulers, prepared_before):
            pair, held = self._with_held(pair, schedulers)
            with working(f"preparing the {type(pair.model).__name__}"):
                training = start_training(
                    self._run.document,
                    facts,
                    self._run.strategy,
                    self._run.processes,
                    self.default_window,
                    pair,
                    lambda: peek_batch(self.dataloaders),
                    is_placed=id(pair.model) not in left,
                    only_evaluates=only_evaluates,
                )
            training.reduces_each_batch = self._run.options.accumulation.sync_each_batch
            ready[id(pair.model)] = training.session.model
            self._add(training, pair, held, ready)
        for optimizer in optimizers:
            if (follower := following.get(id(optimizer))) is not None:
                self._follow(follower, optimizer, schedulers, ready)

    def _facts(self) -> Facts:
        """The facts that a configuration is resolved from, without those of the model and its optimizer."""
        shared_by = self._run.processes.shared_by
        machine = probe_machine(accelerator_kind(self._run.device), self._run.processes.data_parallel_size)
        intended = self._run.intended_world_size // shared_by
        return Facts(
            loop=self._loop,
            machine=replace(machine, intended=intended, shared_by=shared_by),
            split_batches=self._run.options.loading.split_batches,
            strategy=self._run.strategy.name,
        )

    def _follow(self, training: Training, optimizer: Any, schedulers: list[Any], ready: dict[int, Any]) -> None:
        """Add an optimizer to a model that was prepared in an earlier call."""
        if training.optimizer is not None:
            raise LoopError(
                f"prepare() got a second optimizer of the {type(training.session.module).__name__}: build one, with a "
                "parameter group for each."
            )
        (pair,) = pair_models([training.session.module], [optimizer], schedulers, [])
        pair, held = self._with_held(pair, schedulers)
        add_optimizer(training, self._run.document, self._run.strategy, self._run.processes, pair)
        self.untrained.remove(training)
        self.trainings.remove(training)
        self._add(training, pair, held, ready)

    def _with_held(self, pair: Pair, schedulers: Iterable[Any]) -> tuple[Pair, AcceleratedOptimizer | None]:
        """If the pair's optimizer was prepared before: the pair with its schedulers, and its `AcceleratedOptimizer`."""
        held = self._held(pair.optimizer)
        if held is None:
            return pair, None
        self.waiting.remove(held)
        later = [scheduler for scheduler in schedulers if scheduler.optimizer is held]
        return pair._replace(schedulers=(*(s.scheduler for s in held.schedulers), *later, *pair.schedulers)), held

    def _add(self, training: Training, pair: Pair, held: AcceleratedOptimizer | None, ready: dict[int, Any]) -> None:
        self.trainings.append(training)
        if training.session.leaves_files:
            self._run.leaving_files.append(training.session)
        self.resolved = training.resolved
        if pair.optimizer is None:
            self.untrained.append(training)
            return
        ready[id(pair.optimizer)] = wrap_optimizer(
            training, pair.optimizer, held, self._new_progress(), pair.schedulers
        )
        self.trained.append(training)
        self.window = training.window
        self.first_steps.begin()
        if len({trained.window.steps for trained in self.trained}) > 1:
            raise LoopError(
                "the trained models have different gradient_accumulation_steps; prepare the training loader with the "
                "first of them, or write the number into the configuration."
            )
        if len(self.trained) > 1:
            for trained in self.trained:
                trained.watch_gradients()

    # ---- optimizers and schedulers without their models --------------------------------------------------------------

    def _hold(self, optimizer: Any) -> AcceleratedOptimizer:
        """The `AcceleratedOptimizer` of an optimizer whose model is not prepared yet."""
        if isinstance(optimizer, DummyOptim):
            raise LoopError("prepare() got a DummyOptim without its model; pass both in the same call.")
        held = optimizer if isinstance(optimizer, AcceleratedOptimizer) else AcceleratedOptimizer(optimizer)
        held.run_in(self._new_window(self._run.strategy.hold_optimizer(held.optimizer)))
        self.waiting.append(held)
        return held

    def _hold_for_scheduler(self, optimizer: Any) -> AcceleratedOptimizer:
        """The `AcceleratedOptimizer` of an optimizer that was not passed to `prepare` before its scheduler."""
        refuse_other_steps(optimizer)
        held = self._hold(optimizer)
        if held is not optimizer:
            self._unreturned.append((optimizer, held))
        return held

    def _not_returned(self, optimizer: Any) -> AcceleratedOptimizer | None:
        """The `AcceleratedOptimizer` of an optimizer whose scheduler and model were prepared before; else None."""
        for index, (given, held) in enumerate(self._unreturned):
            if given is optimizer and not held.waits:
                del self._unreturned[index]
                return held
        return None

    def _held(self, optimizer: Any) -> AcceleratedOptimizer | None:
        """The optimizer without a prepared model that is, or wraps, `optimizer`; else None."""
        return next((held for held in self.waiting if optimizer is held or optimizer is held.optimizer), None)

    def _may_follow(self, optimizer: AcceleratedOptimizer) -> bool:
        """Whether its model was prepared without it."""
        return any(holds_any(optimizer, training.session.module) for training in self.untrained)

    def _prepare_scheduler(self, scheduler: Any, *, alone: bool, built_before: bool) -> AcceleratedScheduler:
        """Prepare a scheduler; only one that is prepared `alone` may come before its optimizer.

        `built_before`: whether it was built before the loader was prepared, whose length it may depend on.
        """
        optimizer, options = scheduler.optimizer, self._run.options
        for training in self.trained:
            if training.is_of_optimizer(optimizer):
                prepared = prepare_scheduler(
                    training,
                    scheduler,
                    self._run.document,
                    self._run.processes,
                    step_with_optimizer=options.step_scheduler_with_optimizer,
                    built_before=built_before,
                )
                self.resolved = training.resolved
                return prepared
        held = self._held(optimizer)
        if isinstance(scheduler, DummyScheduler) or not (held or (alone and isinstance(optimizer, Optimizer))):
            raise LoopError(
                f"prepare() got a {type(scheduler).__name__} whose optimizer was not prepared; pass model, optimizer "
                "and scheduler together."
            )
        once = self._run.document.launch.value("scheduler_counts") == "steps" or options.loading.split_batches
        return AcceleratedScheduler(
            scheduler,
            held or self._hold_for_scheduler(optimizer),
            options.step_scheduler_with_optimizer,
            times=1 if once else self._run.intended_world_size // self._run.processes.shared_by,
        )

    # ---- windows -----------------------------------------------------------------------------------------------------

    def _new_window(self, session: UnpreparedOptimizer | None = None) -> Window:
        """A window of as many micro-batches as configured, for what is not trained by a prepared model."""
        steps = self._run.document.deepspeed.value("gradient_accumulation_steps")
        return Window(steps if isinstance(steps, int) else 1, session, self._new_progress())

    def _new_progress(self) -> LoaderProgress:
        """The running loops over prepared loaders, for one window."""
        return LoaderProgress(ends_windows=self._run.options.accumulation.sync_with_dataloader)
