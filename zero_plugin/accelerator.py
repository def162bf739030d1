"""The facade: reads the configuration, prepares what the loop uses, and forwards every call to the session."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from zero_plugin.accumulation import AccumulationWindow
from zero_plugin.agreement import collective
from zero_plugin.config.check import check_document
from zero_plugin.config.find import find_document
from zero_plugin.config.launch_settings import asks_for_cpu, launch_settings
from zero_plugin.config.overlay import overlay_code
from zero_plugin.config.tree import Path as KeyPath
from zero_plugin.data.loader import ActiveLoaders, ShardedLoader
from zero_plugin.data.prepare import ShardIterable
from zero_plugin.errors import LoopError
from zero_plugin.facade.data import DataCalls
from zero_plugin.facade.loop import LoopCalls
from zero_plugin.facade.processes import ProcessCalls
from zero_plugin.facade.weights import WeightCalls
from zero_plugin.first_steps import FirstSteps
from zero_plugin.pairing import pair_models
from zero_plugin.placeholders import DummyOptim, DummyScheduler
from zero_plugin.prepared import PreparedOptimizer, PreparedScheduler
from zero_plugin.probe.loop import probe_loop
from zero_plugin.probe.machine import probe_machine
from zero_plugin.resolve.facts import Facts, LoopFacts
from zero_plugin.resolve.resolved import Resolved
from zero_plugin.strategies.processes import start_processes
from zero_plugin.strategies.select import select_strategy
from zero_plugin.training import Training, prepare_schedule, start_training

__all__ = ["Accelerator"]


class Accelerator(ProcessCalls, DataCalls, LoopCalls, WeightCalls):
    """Trains a model on ZeRO 0-3, DDP or one device, as the configuration says, with one and the same loop.

    The configuration comes from the launcher, from `config`, or is empty. Arguments in code fill what it leaves open;
    an argument that differs from an explicit value is an error.

    Args:
        config: path of a launch YAML or a DeepSpeed JSON, or a dict with either content.
        mixed_precision: `no`, `fp16`, `bf16`, or `auto` for what the device computes best.
        gradient_accumulation_steps: micro-batches per optimizer step.
        cpu: compute on the CPU even where there is a GPU.
        split_batches: the loaders' batch size is that of all processes together.
        even_batches: complete the last step of an epoch with its first samples, so that every process has a full batch.
        shard_iterable: `never` takes iterable data sets to give each process and worker its own samples; `auto` shares
            those out that are not known to.

    Attributes:
        document: what was asked for, with every value's origin.
        resolved: the configuration of the model prepared last, without open fields; None before.
        device: where this process computes.

    Raises:
        ConfigError: everything that is wrong with the configuration.
        LaunchError: the environment does not describe a whole process group.
        StrategyError: what was asked for cannot run here.
    """

    def __init__(
        self,
        *,
        config: str | Path | Mapping[str, Any] | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool | None = None,
        split_batches: bool = False,
        even_batches: bool = True,
        shard_iterable: ShardIterable = "auto",
    ) -> None:
        arguments: dict[KeyPath, tuple[str, Any]] = {
            ("mixed_precision",): ("mixed_precision", mixed_precision),
            ("deepspeed", "gradient_accumulation_steps"): ("gradient_accumulation_steps", gradient_accumulation_steps),
            ("use_cpu",): ("cpu", cpu),
        }
        given = {path: (name, value) for path, (name, value) in arguments.items() if value is not None}
        self.document = overlay_code(
            find_document(config, os.environ),
            {path: value for path, (_, value) in given.items()},
            {path: f"Accelerator({name}={value!r})" for path, (name, value) in given.items()},
        )
        self.document = replace(self.document, notes=check_document(self.document))
        settings = launch_settings(self.document)
        self._processes = start_processes(cpu=asks_for_cpu(settings))
        selection = select_strategy(self.document, settings, self._processes)
        self._strategy = selection.strategy
        self.device = self._processes.device
        self.resolved: Resolved | None = None
        self.split_batches = split_batches
        self._even_batches = even_batches
        self._shard_iterable: ShardIterable = shard_iterable
        self._loaders = ActiveLoaders()
        self._loop = LoopFacts()  # of the loaders prepared last
        self._trainings: list[Training] = []
        self._trained: list[Training] = []  # those with an optimizer
        self._untrained: list[Training] = []
        self._window: AccumulationWindow | None = None  # of the model whose micro-batch runs, or ran last
        self._first_steps = FirstSteps(self._trainings, lambda: self._loaders.current, self._say)
        self._ended = False
        for line in (selection.reason, *(note.headline for note in self.document.notes)):
            self._say(line)
        self._loading = ExitStack()
        self._loading.enter_context(self._strategy.load_pretrained())
        atexit.register(self._end_at_exit)

    def init_model(self) -> AbstractContextManager[None]:
        """A model made inside is never whole in any process, where the strategy partitions parameters (ZeRO stage 3).

        Its values are those that it would have outside. transformers' `from_pretrained` and `from_config` need no such
        context after `Accelerator()`, unless the configuration says `zero3_init_flag: false`.
        """
        return self._strategy.init_model()

    @collective("prepare", meets=True)
    def prepare(self, *objects: Any) -> Any:
        """Models, optimizers, loaders and schedules, ready for the loop, in the order given.

        A model and its optimizer (or `DummyOptim`) come in one call; several models may come in one call or in several.
        A model without an optimizer is not trained. Anything else passes unchanged.

        Raises:
            ConfigError: open fields that cannot be filled, and contradictions between the configuration and the loop.
            LoopError: an object prepared twice, a model loaded with `device_map`, models that share parameters, an
                optimizer without its model, of another model or of several.
        """
        loaders = [o for o in objects if isinstance(o, DataLoader)]
        models = [o for o in objects if isinstance(o, nn.Module)]
        optimizers = [o for o in objects if isinstance(o, Optimizer | DummyOptim)]
        schedules = [o for o in objects if isinstance(o, LRScheduler | DummyScheduler)]
        self._refuse_prepared(objects)
        pairs = pair_models(models, optimizers, schedules, [training.session.module for training in self._trainings])
        ready: dict[int, Any] = {id(loader): self.prepare_data_loader(loader) for loader in loaders}
        if loaders:
            self._loop = probe_loop(
                loaders,
                [ready[id(loader)] for loader in loaders],
                processes=self.num_processes,
                split_batches=self.split_batches,
            )
        facts = Facts(
            loop=self._loop,
            machine=probe_machine("cuda" if self.device.type == "cuda" else "cpu", self.num_processes),
            split_batches=self.split_batches,
            strategy=self._strategy.name,
        )
        for pair in pairs:
            training = start_training(
                self.document, facts, self._strategy, self._processes, lambda: self._loaders.current, pair, self._say
            )
            ready[id(pair.model)] = training.session.model
            if pair.optimizer is not None:
                ready[id(pair.optimizer)] = training.optimizer
            self._add(training)
        for schedule in schedules:
            training = self._training_of(schedule.optimizer)
            ready[id(schedule)] = prepare_schedule(training, schedule, self.document, self._processes, self._say)
            self.resolved = training.resolved
        prepared = tuple(ready.get(id(o), o) for o in objects)
        return prepared if len(prepared) != 1 else prepared[0]

    def _add(self, training: Training) -> None:
        self._trainings.append(training)
        self.resolved = training.resolved
        if training.optimizer is None:
            self._untrained.append(training)
            return
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

    def _training_of(self, optimizer: Any) -> Training:
        for training in self._trainings:
            if training.is_of_optimizer(optimizer):
                return training
        raise LoopError(
            "prepare() got a scheduler whose optimizer was not prepared; pass model, optimizer and scheduler together."
        )

    def _refuse_prepared(self, objects: tuple[Any, ...]) -> None:
        for position, o in enumerate(objects):
            if (
                isinstance(o, ShardedLoader | PreparedOptimizer | PreparedScheduler)
                or any(training.is_of_model(o) or training.is_of_optimizer(o) for training in self._trainings)
                or (isinstance(o, nn.Module | Optimizer | DummyOptim) and any(o is p for p in objects[:position]))
            ):
                raise LoopError(f"prepare() got a {type(o).__name__} that is prepared already; prepare each once.")

    def end_training(self) -> None:
        """Close every session and the process group; collective. It also runs at the end of the process."""
        if not self._ended:
            self._ended = True
            self._first_steps.say_if_none()
            self._close()

    @collective("end_training", meets=True)
    def _close(self) -> None:
        self._loading.close()
        for training in self._trained:
            for line in training.describe_end():
                self._say(line)
        for training in self._trainings:
            training.session.close()
        self._processes.stop(self._strategy.destroy_process_group)

    def _end_at_exit(self) -> None:
        # After an error the other processes will not come to a barrier; they are ended by the launcher.
        if getattr(sys, "last_exc", None) is None and getattr(sys, "last_value", None) is None:
            try:
                self.end_training()
            except LoopError as error:  # another process is not at its end; Python would exit with 0
                print(f"zero_plugin: error: {error}", file=sys.stderr, flush=True)  # noqa: T201
                os._exit(1)

    def _say(self, line: str) -> None:
        if self.is_main_process:
            print(f"zero_plugin: {line}", file=sys.stderr, flush=True)  # noqa: T201 - before any logging is set up
