"""The facade: reads the configuration, prepares what the loop uses, and forwards every call to the session."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zero_plugin.checkpoint.background import BackgroundWriter
from zero_plugin.checkpoint.folders import Lineages
from zero_plugin.config.choices import DynamoBackend, RNGType
from zero_plugin.config.deepspeed_plugin import Configurations, DeepSpeedPlugin
from zero_plugin.config.document import Document
from zero_plugin.config.find import find_document
from zero_plugin.config.launch_settings import asks_for_cpu, asks_for_tpu, launch_settings
from zero_plugin.config.plugins import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProjectConfiguration,
    TorchDynamoPlugin,
    sort_handlers,
)
from zero_plugin.config.resolve.facts import LoopFacts, Resolved
from zero_plugin.data.active import RUNNING
from zero_plugin.data.adapter import DataLoaderAdapter
from zero_plugin.data.prepare import ShardIterable
from zero_plugin.distributed.collective_check import call_before_end, collective
from zero_plugin.distributed.process_calls import ProcessCalls
from zero_plugin.distributed.processes import Processes, call_at_exit, start_processes
from zero_plugin.distributed.stop_request import StopRequest
from zero_plugin.facade.checkpoints import CheckpointCalls, SaveHook
from zero_plugin.facade.collecting import CollectingCalls
from zero_plugin.facade.compute import ComputeCalls
from zero_plugin.facade.data import DataCalls
from zero_plugin.facade.gradients import GradientCalls
from zero_plugin.facade.loading import LoadingCalls
from zero_plugin.facade.loop import LoopCalls
from zero_plugin.facade.prepare import PrepareCalls
from zero_plugin.facade.pretrained import checking_pretrained
from zero_plugin.facade.restoring import LoadHook, RestoringCalls
from zero_plugin.facade.resuming import ResumingCalls
from zero_plugin.facade.settings import SettingCalls
from zero_plugin.facade.tracking import TrackingCalls
from zero_plugin.facade.weights import WeightCalls
from zero_plugin.loop.arguments import (
    choose_accumulation,
    choose_compiler,
    choose_loading,
    choose_plugins,
    choose_project,
    choose_rng_types,
    overlay_arguments,
    refuse_arguments,
)
from zero_plugin.loop.backward import FirstSteps
from zero_plugin.loop.fewer_processes import find_intended_processes
from zero_plugin.loop.optimizer import AcceleratedOptimizer
from zero_plugin.loop.out_of_memory import Shortages, accumulate_more, agree_on_cut, explain_shortages
from zero_plugin.loop.same_everywhere import expect_same_run
from zero_plugin.loop.state import AcceleratorState, show_run
from zero_plugin.loop.training import Training
from zero_plugin.machine.device_memory import Meter
from zero_plugin.machine.memory import available_cpu_memory
from zero_plugin.plan.run_plan import local_processes
from zero_plugin.strategies.base import Session, Strategy
from zero_plugin.strategies.select import select_strategy
from zero_plugin.trackers.choose import choose_trackers
from zero_plugin.trackers.trackers import GeneralTracker

__all__ = ["Accelerator"]


class Accelerator(
    SettingCalls,
    ProcessCalls,
    CollectingCalls,
    DataCalls,
    PrepareCalls,
    LoopCalls,
    GradientCalls,
    ComputeCalls,
    WeightCalls,
    LoadingCalls,
    CheckpointCalls,
    RestoringCalls,
    ResumingCalls,
    TrackingCalls,
    Shortages,
):
    """Trains a model on ZeRO 0-3, DDP or one device, as the configuration says, with one and the same loop.

    The configuration comes from the launcher, from `config`, or is empty. Arguments in code fill what it leaves open;
    an argument that differs from an explicit value is an error, and so is one that cannot be honoured.

    Args:
        device_placement: move models and batches to the device of this process.
        split_batches: the loaders' batch size is that of all processes together.
        mixed_precision: `no`, `fp16`, `bf16`, or `auto` for what the device computes best.
        gradient_accumulation_steps: micro-batches per optimizer step.
        cpu: compute on the CPU even where there is a GPU.
        dataloader_config: how loaders are shared out, in one record.
        deepspeed_plugin: a DeepSpeed configuration in code, or several by name, of which
            `state.select_deepspeed_plugin(name)` chooses.
        fsdp_plugin, torch_tp_plugin, megatron_lm_plugin, parallelism_config: refused, with what to write instead.
        rng_types: the generators whose state processes share at each epoch's start: `generator`, `torch`, `cuda`.
        log_with: trackers, by name or as objects.
        project_dir: folder of the run.
        project_config: where the run keeps what it writes, in one record.
        gradient_accumulation_plugin: how gradients add up, in one record.
        step_scheduler_with_optimizer: a prepared schedule moves with the optimizer only; else at each of its calls.
        kwargs_handlers: arguments of torch's own objects; see `zero_plugin.config.plugins`.
        dynamo_backend, dynamo_plugin: compile models, by the compiler's name or with all arguments.
        deepspeed_plugins: the same as `deepspeed_plugin`.
        config: path of a launch YAML or a DeepSpeed JSON, or a dict with either content.
        even_batches: complete the last step of an epoch with its first samples, so that every process has a full batch.
        shard_iterable: `never` takes iterable data sets to give each process and worker its own samples; `auto` shares
            those out that are not known to.

    Attributes:
        document: what was asked for, with every value's origin.
        resolved: the configuration of the model prepared last, without open fields; None before.
        device: where this process computes.
        state, gradient_state: what Accelerate's scripts look up.

    Raises:
        ConfigError: everything that is wrong with the configuration.
        LaunchError: the environment does not describe a whole process group.
        StrategyError: what was asked for cannot run here.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = False,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool | None = None,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None = None,
        fsdp_plugin: None = None,
        torch_tp_plugin: None = None,
        megatron_lm_plugin: None = None,
        rng_types: Iterable[str | RNGType] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Iterable[KwargsHandler] | None = None,
        dynamo_backend: str | DynamoBackend | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None = None,
        parallelism_config: None = None,
        *,
        config: str | Path | Mapping[str, Any] | None = None,
        even_batches: bool | None = None,
        shard_iterable: ShardIterable = "auto",
    ) -> None:
        refuse_arguments(
            fsdp_plugin=fsdp_plugin,
            torch_tp_plugin=torch_tp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
            parallelism_config=parallelism_config,
        )
        self.device_placement = device_placement
        self.dataloader_config = choose_loading(
            dataloader_config, split_batches=split_batches, even_batches=even_batches
        )
        self.gradient_accumulation_plugin = choose_accumulation(
            gradient_accumulation_plugin, gradient_accumulation_steps
        )
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.rng_types = choose_rng_types(rng_types)
        self.project_configuration = choose_project(project_config, project_dir)
        self.log_with = choose_trackers(log_with, self.project_configuration.logging_dir)
        self._handlers = sort_handlers(kwargs_handlers)
        self._shard_iterable: ShardIterable = shard_iterable
        self._configurations = self._find_configurations(
            config,
            choose_plugins(deepspeed_plugin, deepspeed_plugins),
            lambda document: overlay_arguments(
                document,
                mixed_precision=mixed_precision,
                accumulation=self.gradient_accumulation_plugin,
                cpu=cpu,
                scaler=self._handlers.scaler,
            ),
        )
        compiler = choose_compiler(dynamo_backend, dynamo_plugin, self._configurations.document)
        self._handlers = replace(self._handlers, compiler=compiler)
        self._processes = self._join_processes()
        self._say = functools.partial(_say, is_main=self._processes.rank == 0)
        self._background = BackgroundWriter(self._say)
        self._end = _End(self, self._processes, self._background)
        self.trackers: list[GeneralTracker] = self._end.trackers
        self._loading, self._stop, self._leaving_files = self._end.loading, self._end.stop, self._end.leaving_files
        world = self._processes.world_size
        self._intended = find_intended_processes(world, os.environ)
        expect_same_run(self._configurations.document, self._processes)
        self._cut = agree_on_cut(world, os.environ)
        self._accumulated_by = world if self.dataloader_config.split_batches else self._intended
        if self._cut > 1 or self._accumulated_by != world:
            self._configurations.overlay(lambda d: accumulate_more(d, self._cut, self._accumulated_by, world))
        self.device = self._processes.device
        self._meter = Meter(self._processes.world_size, self.device)
        self._told: set[str] = set()
        self._host_bytes = available_cpu_memory()
        self._use_configuration(self._configurations.document)
        if self._intended != world:
            self._say(f"{world} of {self._intended} processes have met; the global batch stays as it is")
        self.resolved: Resolved | None = None
        self._dataloaders: list[DataLoaderAdapter] = []
        self._loop = LoopFacts()  # of the loaders prepared last
        self._trainings: list[Training] = []
        self._trained: list[Training] = []  # those with an optimizer
        self._untrained: list[Training] = []
        self._waiting: list[AcceleratedOptimizer] = []  # for their models
        self._unreturned: list[tuple[Any, AcceleratedOptimizer]] = []  # the script's own, known by their schedules
        self._lineages = Lineages()
        self._must_resume = launch_settings(self.document).auto_resume  # before it trains
        self._custom_objects: list[Any] = []
        self._save_model_state_pre_hook: OrderedDict[int, SaveHook] = OrderedDict()
        self._load_model_state_pre_hook: OrderedDict[int, LoadHook] = OrderedDict()
        self._window = self._loose = self._new_window()
        self._first_steps = FirstSteps(self._trainings, lambda: RUNNING.current, self._say)
        self._end.begin(explain_shortages(self._explain_shortage))
        self.state, self.gradient_state = show_run(self, self.gradient_accumulation_plugin.to_kwargs())

    def _find_configurations(
        self, config: Any, plugins: Mapping[str, DeepSpeedPlugin], overlay: Callable[[Document], Document]
    ) -> Configurations:
        newest: _End | None = AcceleratorState._shared_state.get("_end")
        is_open = config is None and not plugins
        if is_open and newest is not None and newest.configurations is not None and newest.configurations.in_code:
            # Scripts that train several models make an Accelerator for each, and pass the plugins to the first.
            newest.configurations.overlay(overlay)
            return newest.configurations
        return Configurations(find_document(config, os.environ), plugins, overlay)

    def _join_processes(self) -> Processes:
        given = self._handlers.process_group or InitProcessGroupKwargs()
        if self._handlers.process_group is not None and dist.is_initialized():
            warnings.warn("InitProcessGroupKwargs has no effect: the process group is there already", stacklevel=3)
        settings = launch_settings(self._configurations.document)
        return start_processes(
            cpu=asks_for_cpu(settings),
            xla=asks_for_tpu(settings),
            backend=given.backend,
            timeout=given.timeout,
            init_method=given.init_method,
        )

    def _use_configuration(self, document: Document) -> None:
        """Set up what follows from a document: the strategy, and how transformers builds models."""
        self.document = document
        selection = select_strategy(document, launch_settings(document), self._processes)
        self._strategy = self._end.strategy = selection.strategy
        self.distributed_type = selection.strategy.distributed_type
        notes = (str(note) if note.severity == "warning" else note.headline for note in document.notes)
        for line in (selection.reason, *notes, *self._strategy.accept(self._handlers)):
            if line not in self._told:
                self._told.add(line)
                self._say(line)
        self._loading.close()
        self._loading.enter_context(self._strategy.load_pretrained())
        if not self._strategy.partitions_parameters or launch_settings(document).zero3_init_flag is False:
            self._loading.enter_context(checking_pretrained(local_processes(self._processes), self._host_bytes))
        if self.deepspeed_plugin is not None:
            self.deepspeed_plugin.build_pretrained_by(self._strategy.load_pretrained)

    def _follow_configuration(self) -> None:
        """Take another plugin that was selected, and what the script wrote into it."""
        document = self._configurations.follow_edits()
        if document is not self.document:
            self._use_configuration(document)

    def __deepcopy__(self, _: dict[int, Any]) -> Accelerator:
        return self  # objects that hold one are copied for the same run

    def __reduce__(self) -> tuple[Callable[[], Accelerator], tuple[()]]:
        return newest_accelerator, ()  # so are those that are pickled, as `datasets` does to see whether they changed

    def end_training(self) -> None:
        """Close every session and the process group; collective. It also runs at the end of the process.

        What cannot be closed does not keep the rest open, nor the other processes waiting: its exception comes last.

        Raises:
            CheckpointError: a save in the background has failed; all is closed nevertheless.
        """
        self._end()


class _End:
    """The end of a run, which is due also where the script has dropped its `Accelerator`: that is freed then.

    Garbage is collected at other times on each process, so that what is freed communicates nothing, and what the end
    communicates is the same whether the `Accelerator` is still there or not.

    Args:
        accelerator: it is not kept.
        processes: this process and its peers.
        background: writes its checkpoints.

    Attributes:
        configurations: those of the `Accelerator`, once it is complete, until the end.
        trackers: those that are started.
        loading: how transformers builds models meanwhile.
        stop: whether the process is asked to stop.
        leaving_files: sessions that have files to remove, which is collective.
        strategy: the one in use.
    """

    def __init__(self, accelerator: Accelerator, processes: Processes, background: BackgroundWriter) -> None:
        self._accelerator = weakref.ref(accelerator)
        self._processes = processes
        self._background = background
        self._is_due = False
        self._undo_explaining: Callable[[], None] = lambda: None
        self.configurations: Configurations | None = None
        self.trackers: list[GeneralTracker] = []
        self.loading = ExitStack()
        self.stop = StopRequest()
        self.leaving_files: list[Session] = []
        self.strategy: Strategy | None = None

    def begin(self, undo_explaining: Callable[[], None]) -> None:
        """The `Accelerator` is complete; from now on its run has to end."""
        accelerator = self._accelerator()
        assert accelerator is not None, "it calls"
        self.configurations = accelerator._configurations
        self._undo_explaining = undo_explaining
        self._is_due = True
        self._processes.hold(self)
        self._at_exit = call_at_exit(self)
        call_before_end(self.finish_trackers)
        call_before_end(self._background.wait_for_writing)
        weakref.finalize(accelerator, self._forget_dropped).atexit = False

    def _forget_dropped(self) -> None:
        """The `Accelerator` is gone; as garbage, whenever it is collected, so that nothing here communicates."""
        self._background.forget()
        assert self.strategy is not None, "a complete Accelerator has one"
        self.strategy.forget_dropped()

    def __call__(self) -> None:
        """See `Accelerator.end_training`."""
        if not self._is_due:
            return
        self._is_due = False
        self.configurations = None
        atexit.unregister(self._at_exit)
        self._undo_explaining()
        if (accelerator := self._accelerator()) is not None:
            accelerator._first_steps.say_if_none()
        self._close()

    @collective("end_training", meets=True)
    def _close(self) -> None:
        with ExitStack() as ends:  # the last one first
            assert self.strategy is not None, "a complete Accelerator has one"
            ends.callback(self._processes.stop, self, self.strategy.destroy_process_group)
            for session in self._sessions():
                ends.callback(session.close)
            ends.callback(self._describe_end)
            ends.callback(self.loading.close)
            ends.callback(self.finish_trackers)
            ends.callback(self.stop.forget)
            ends.callback(self._background.close)
        self.leaving_files.clear()

    def finish_trackers(self) -> None:
        """Have all of them write what they keep, though one fails."""
        with ExitStack() as ends:
            for tracker in reversed(self.trackers):
                ends.callback(tracker.finish)
            self.trackers.clear()

    def _sessions(self) -> list[Session]:
        """Those to close, the last one first; of an `Accelerator` that was dropped, what has to be removed by all."""
        accelerator = self._accelerator()
        trainings = [] if accelerator is None else accelerator._trainings
        sessions = {id(session): session for session in [*(t.session for t in trainings), *self.leaving_files]}
        return list(reversed(sessions.values()))

    def _describe_end(self) -> None:
        if (accelerator := self._accelerator()) is not None:
            for training in accelerator._trained:
                for line in training.describe_end():
                    accelerator._say(line)


def _say(line: str, *, is_main: bool) -> None:
    if is_main:
        print(f"zero_plugin: {line}", file=sys.stderr, flush=True)  # noqa: T201 - before any logging is set up


def newest_accelerator() -> Accelerator:
    """The newest one in this process, which is what a pickled one comes back as.

    Raises:
        LoopError: there is none.
    """
    newest: Accelerator = AcceleratorState()._run  # type: ignore[assignment]  # it shows what is one
    return newest
