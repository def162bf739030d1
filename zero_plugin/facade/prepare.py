"""What a script calls to prepare what its loop uses, in one call or in several, and to let go of it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from zero_plugin.accumulation import AccumulationWindow, Epoch
from zero_plugin.agreement import collective
from zero_plugin.config.document import Document
from zero_plugin.data.active import RUNNING
from zero_plugin.data.adapter import DataLoaderAdapter
from zero_plugin.errors import LoopError
from zero_plugin.first_steps import FirstSteps
from zero_plugin.optimizer import AcceleratedOptimizer
from zero_plugin.pairing import Pair, holds_any, pair_models
from zero_plugin.placeholders import DummyOptim, DummyScheduler
from zero_plugin.plugins import DataLoaderConfiguration, GradientAccumulationPlugin
from zero_plugin.preparing import add_optimizer, begin_steps, prepare_schedule, start_training
from zero_plugin.probe.loop import probe_loop
from zero_plugin.probe.machine import probe_machine
from zero_plugin.resolve.facts import Facts, LoopFacts
from zero_plugin.resolve.resolved import Resolved
from zero_plugin.scheduler import AcceleratedScheduler
from zero_plugin.strategies.base import Strategy
from zero_plugin.strategies.processes import Processes
from zero_plugin.training import Training

__all__ = ["PrepareCalls"]


class PrepareCalls:
    """The calls of the facade that prepare models, optimizers, loaders and schedules.

    Attributes:
        step_scheduler_with_optimizer: False: every call of a prepared schedule's `step` advances it once.
    """

    device: torch.device
    device_placement: bool
    document: Document
    resolved: Resolved | None
    dataloader_config: DataLoaderConfiguration
    step_scheduler_with_optimizer: bool
    gradient_accumulation_plugin: GradientAccumulationPlugin
    _dataloaders: list[DataLoaderAdapter]
    _first_steps: FirstSteps
    _loop: LoopFacts  # of the loaders prepared last
    _loose: AccumulationWindow  # of what is prepared without an optimizer
    _processes: Processes
    _say: Callable[[str], None]
    _strategy: Strategy
    _trained: list[Training]
    _trainings: list[Training]
    _untrained: list[Training]
    _waiting: list[AcceleratedOptimizer]  # for their models
    _window: AccumulationWindow  # of the model whose micro-batch runs, or ran last
    _follow_configuration: Callable[[], None]
    prepare_data_loader: Callable[..., Any]

    def prepare(self, *objects: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Models, optimizers, loaders and schedules, ready for the loop, in the order given; collective.

        A model and its optimizer (or `DummyOptim`) come best in one call. Where the model comes later, its optimizer
        waits for it; where the optimizer comes later, it finds the model, but not under ZeRO. A model without an
        optimizer is not trained. Anything else passes unchanged, and so does what is prepared already.

        Args:
            *objects: in any order.
            device_placement: for each object, whether a model goes to this process's device; None: as `Accelerator` was
                told, else it does.

        Raises:
            ConfigError: open fields that cannot be filled, and contradictions between the configuration and the loop.
            LoopError: an object whose prepared form is another one, a model loaded with `device_map`, models that share
                parameters, an optimizer of another model or of several, or that comes too late.
            ValueError: `device_placement` has another length.
        """
        if device_placement is None:
            device_placement = [None] * len(objects)
        elif len(device_placement) != len(objects):
            raise ValueError(f"prepare(device_placement=…): found {len(device_placement)} for {len(objects)} objects.")
        left = {id(o) for o, placed in zip(objects, device_placement, strict=True) if self._stays(placed)}
        prepared = self._prepare(objects, left)
        return prepared if len(prepared) != 1 else prepared[0]

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """`prepare` for a model by itself; collective.

        Args:
            model: its optimizer may come later, but not under ZeRO.
            device_placement: False leaves it where it is.
            evaluation_mode: it is never trained, so that no room is kept for its gradients.
        """
        left = {id(model)} if self._stays(device_placement) else set()
        prepared: nn.Module = self._prepare((model,), left, only_evaluates=evaluation_mode)[0]
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> AcceleratedOptimizer:  # noqa: ARG002
        """`prepare` for an optimizer by itself; collective. Its states are where its parameters are."""
        prepared: AcceleratedOptimizer = self._prepare((optimizer,), set())[0]
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """`prepare` for a schedule by itself; collective."""
        prepared: AcceleratedScheduler = self._prepare((scheduler,), set())[0]
        return prepared

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether some module in `model` was spread over several devices by `device_map`."""
        return any(len(getattr(module, "hf_device_map", None) or ()) > 1 for module in model.modules())

    def free_memory(self, *objects: Any) -> list[None]:
        """Let go of all that is prepared, and return memory; another model can be prepared then.

        Args:
            *objects: `model, optimizer = accelerator.free_memory(model, optimizer)` drops the script's own references.

        Returns:
            A None for each object.
        """
        released: list[None] = [None] * len(objects)
        del objects
        for training in self._trainings:
            training.session.close()
        for held in self._waiting:
            held.session.close()
        for prepared in (self._trainings, self._trained, self._untrained, self._waiting, self._dataloaders):
            prepared.clear()
        self._loop = LoopFacts()
        self._first_steps.pending = True
        self._window = self._loose = self._new_window()
        self.resolved = None
        gc.collect()
        torch.cuda.empty_cache()  # does nothing where CUDA was not used
        return released

    clear = free_memory

    # Accelerate's names of what is prepared, which scripts look into.

    @property
    def _models(self) -> list[nn.Module]:
        return [training.session.model for training in self._trainings]

    @property
    def _optimizers(self) -> list[AcceleratedOptimizer]:
        return [*(t.optimizer for t in self._trained if t.optimizer is not None), *self._waiting]

    @property
    def _schedulers(self) -> list[AcceleratedScheduler]:
        return [schedule for optimizer in self._optimizers for schedule in optimizer.schedules]

    def _stays(self, placed: bool | None) -> bool:
        return not (self.device_placement if placed is None else placed)

    @collective("prepare", meets=True)
    def _prepare(self, objects: Sequence[Any], left: set[int], *, only_evaluates: bool = False) -> tuple[Any, ...]:
        """What `objects` become; of those whose id is in `left`, a model is not moved."""
        self._follow_configuration()
        loaders: list[DataLoader[Any]] = []
        models: list[nn.Module] = []
        optimizers: list[Optimizer | DummyOptim] = []
        schedules: list[Any] = []
        for position, o in enumerate(objects):
            if self._is_prepared(o):
                continue
            kinds = ((loaders, DataLoader), (models, nn.Module), (optimizers, Optimizer | DummyOptim))
            for found, kind in (*kinds, (schedules, LRScheduler | DummyScheduler)):
                if isinstance(o, kind):
                    if any(o is other for other in objects[:position]):
                        raise LoopError(f"prepare() got one {type(o).__name__} twice; name each once.")
                    found.append(o)  # type: ignore[arg-type]  # each list holds its kind
                    break
        ready: dict[int, Any] = {}
        self._prepare_loaders(loaders, ready)
        self._prepare_models(models, optimizers, schedules, ready, left, only_evaluates=only_evaluates)
        for schedule in schedules:
            ready[id(schedule)] = self._prepare_schedule(schedule)
        for model in self._models:
            model._is_accelerate_prepared = True  # type: ignore[assignment]  # Accelerate's mark, which scripts look for
        return tuple(ready.get(id(o), o) for o in objects)

    def _is_prepared(self, o: Any) -> bool:
        """Whether it passes unchanged.

        Raises:
            LoopError: it does not, since its prepared form is another object.
        """
        if isinstance(o, AcceleratedOptimizer):
            if o.waits and not any(o is held for held in self._waiting):  # the script has made it itself
                self._hold(o)
            return True
        if isinstance(o, AcceleratedScheduler) or any(o is training.session.model for training in self._trainings):
            return True
        if isinstance(o, DataLoader):
            return bool(getattr(o, "_is_accelerate_prepared", False))
        if any(training.is_of_model(o) or training.is_of_optimizer(o) for training in self._trainings):
            raise LoopError(
                f"prepare() got a {type(o).__name__} that is prepared already; go on with what it returned for that."
            )
        return False

    def _prepare_loaders(self, loaders: list[DataLoader[Any]], ready: dict[int, Any]) -> None:
        if loaders:
            ready.update({id(loader): self.prepare_data_loader(loader) for loader in loaders})
            prepared = [ready[id(loader)] for loader in loaders]
            self._loop = probe_loop(
                loaders,
                prepared,
                processes=self._processes.world_size,
                split_batches=self.dataloader_config.split_batches,
            )

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
            machine=probe_machine("cuda" if self.device.type == "cuda" else "cpu", self._processes.world_size),
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
        self.resolved = training.resolved
        if pair.optimizer is None:
            self._untrained.append(training)
            return
        ready[id(pair.optimizer)] = begin_steps(
            training, pair.optimizer, held, self._running_epoch(), pair.schedules, self._say
        )
        self._trained.append(training)
        self._window = training.window
        self._first_steps.pending = True
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

    def _held(self, optimizer: Any) -> AcceleratedOptimizer | None:
        """The one among those that wait that is, or stands for, `optimizer`."""
        return next((held for held in self._waiting if optimizer is held or optimizer is held.optimizer), None)

    def _prepare_schedule(self, schedule: Any) -> AcceleratedScheduler:
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
                )
                self.resolved = training.resolved
                return prepared
        if isinstance(schedule, DummyScheduler) or not isinstance(optimizer, Optimizer):
            raise LoopError(
                f"prepare() got a {type(schedule).__name__} whose optimizer was not prepared; pass model, optimizer "
                "and scheduler together."
            )
        once = self.document.launch.value("scheduler_counts") == "steps" or self.dataloader_config.split_batches
        return AcceleratedScheduler(
            schedule,
            self._held(optimizer) or self._hold(optimizer),
            self.step_scheduler_with_optimizer,
            times=1 if once else self._processes.world_size,
        )

    def _new_window(self) -> AccumulationWindow:
        """The window of what is prepared without an optimizer."""
        asked = self.document.deepspeed.value("gradient_accumulation_steps")
        return AccumulationWindow(asked if isinstance(asked, int) else 1, self._running_epoch())

    def _running_epoch(self) -> Callable[[], Epoch | None]:
        """The prepared loader that is being iterated, whose end ends a window."""
        if not self.gradient_accumulation_plugin.sync_with_dataloader:
            return lambda: None
        return lambda: RUNNING.current
