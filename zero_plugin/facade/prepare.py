"""What a script calls to prepare what its loop uses, in one call or in several, and to let go of it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from zero_plugin.checkpoint.background import BackgroundWriter
from zero_plugin.config.deepspeed_plugin import Configurations
from zero_plugin.config.placeholders import DummyOptim, DummyScheduler
from zero_plugin.config.resolve.facts import LoopFacts
from zero_plugin.data.adapter import DataLoaderAdapter
from zero_plugin.distributed.collective_check import collective
from zero_plugin.errors import LoopError
from zero_plugin.facade.joining import Joining
from zero_plugin.loop.optimizer import AcceleratedOptimizer
from zero_plugin.loop.prepare import join_loaders
from zero_plugin.loop.same_everywhere import expect_same_models
from zero_plugin.loop.scheduler import AcceleratedScheduler
from zero_plugin.loop.training import refuse_closure
from zero_plugin.plan.run_facts import probe_loop, surely_train


class PrepareCalls(Joining):
    """The calls of the facade that prepare models, optimizers, loaders and schedules."""

    device_placement: bool
    prepare_data_loader: Callable[..., Any]
    _background: BackgroundWriter
    _configurations: Configurations
    _cut: int
    _dataloaders: list[DataLoaderAdapter]
    _freed = False  # free_memory() was called since the last prepare()
    _follow_configuration: Callable[[], None]

    def prepare(self, *objects: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Models, optimizers, loaders and schedules, ready for the loop, in the order given; collective.

        A model and its optimizer (or `DummyOptim`) come best in one call. Where the model comes later, its optimizer
        waits for it; where the optimizer comes later, it finds the model, but not under ZeRO. A model without an
        optimizer is not trained. Anything else passes unchanged, and so does what is prepared already.

        Args:
            *objects: in any order.
            device_placement: for each object, whether a model, or what a loader gives, goes to this process's device;
                None: as `Accelerator` was told, else it does.

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

        A checkpoint that is being written behind the training is completed all the same.

        Args:
            *objects: `model, optimizer = accelerator.free_memory(model, optimizer)` drops the script's own references.

        Returns:
            A None for each object.
        """
        released: list[None] = [None] * len(objects)
        del objects
        for training in self._trainings:
            if training.session.before_change is not None:
                training.session.before_change()
            training.session.close()
        for held in self._waiting:
            held.session.close()
        of_models: tuple[list[Any], ...] = (self._trainings, self._trained, self._untrained, self._leaving_files)
        for prepared in (*of_models, self._waiting, self._dataloaders):
            prepared.clear()
        self._unreturned.clear()
        self._background.memory.release()
        self._loop = LoopFacts()
        self._first_steps.begin()
        self._freed = True
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
        """What `objects` become; of those whose id is in `left`, neither a model nor a loader's batches are moved."""
        self._follow_configuration()
        if self._freed:
            self._freed = False
            gc.collect()  # the wrapper that the script has let go of meanwhile still hooks the model's parameters
        loaders: list[DataLoader[Any]] = []
        models: list[nn.Module] = []
        optimizers: list[Optimizer | DummyOptim] = []
        schedules: list[Any] = []
        ready: dict[int, Any] = {}
        for position, o in enumerate(objects):
            if (held := self._not_returned(o)) is not None:
                ready[id(o)] = held
                continue
            if self._is_prepared(o):
                if isinstance(o, AcceleratedOptimizer) and o.waits and self._may_follow(o):
                    optimizers.append(o.optimizer)
                continue
            kinds = ((loaders, DataLoader), (models, nn.Module), (optimizers, Optimizer | DummyOptim))
            for found, kind in (*kinds, (schedules, LRScheduler | DummyScheduler)):
                if isinstance(o, kind):
                    if any(o is other for other in objects[:position]):
                        raise LoopError(f"prepare() got one {type(o).__name__} twice; name each once.")
                    found.append(o)  # type: ignore[arg-type]  # each list holds its kind
                    break
        for optimizer in optimizers:
            refuse_closure(optimizer)
        expect_same_models(models, optimizers)
        self._prepare_loaders(loaders, ready, left)
        self._prepare_models(models, optimizers, schedules, ready, left, only_evaluates=only_evaluates)
        for schedule in schedules:
            ready[id(schedule)] = self._prepare_schedule(
                schedule, alone=not (models or optimizers), built_before=bool(loaders)
            )
        if self.resolved is not None and (models or schedules):
            self._configurations.show(self.resolved.tree.nested(auto="auto"))
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
            prepared = bool(getattr(o, "_is_accelerate_prepared", False))
            if prepared:
                self.prepare_data_loader(o)  # it counts among this Accelerator's, whoever has prepared it
            return prepared
        known = any(training.is_of_model(o) or training.is_of_optimizer(o) for training in self._trainings)
        if known or any(o is schedule.scheduler for schedule in self._schedulers):
            raise LoopError(
                f"prepare() got a {type(o).__name__} that is prepared already; go on with what it returned for that."
            )
        return False

    def _prepare_loaders(self, loaders: list[DataLoader[Any]], ready: dict[int, Any], left: set[int]) -> None:
        if loaders:
            for loader in loaders:
                ready[id(loader)] = self.prepare_data_loader(loader, device_placement=id(loader) not in left)
            prepared = [ready[id(loader)] for loader in loaders]
            self._loop = probe_loop(
                loaders,
                prepared,
                processes=self._processes.world_size,
                split_batches=self.dataloader_config.split_batches,
                cut=self._cut,
            )
            for training in self._trained:
                is_shown = self.resolved is training.resolved
                join_loaders(training, self._loop, self.document, self._say, surely_trains=surely_train(loaders))
                if is_shown:
                    self.resolved = training.resolved
