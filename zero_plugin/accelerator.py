"""The public API: `Accelerator` reads the configuration, prepares what a loop uses, and trains it."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.profiler import profile
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from zero_plugin.checkpoint.load import LoadReport
from zero_plugin.checkpoint.load_weights import WeightsReport
from zero_plugin.config.choices import DistributedType, DynamoBackend, RNGType
from zero_plugin.config.deepspeed_plugin import DeepSpeedPlugin
from zero_plugin.config.document import Document
from zero_plugin.config.plugins import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
    sort_handlers,
)
from zero_plugin.config.resolve.facts import Resolved
from zero_plugin.data.active import RUNNING
from zero_plugin.data.adapter import DataLoaderAdapter
from zero_plugin.data.dispatch import SliceFunction
from zero_plugin.data.loader import skip_first_batches
from zero_plugin.data.metrics import gather_for_metrics
from zero_plugin.data.prepare import ShardIterable
from zero_plugin.distributed import collectives
from zero_plugin.distributed.collectives import Reduction, any_process
from zero_plugin.distributed.process_calls import Function
from zero_plugin.loop.arguments import (
    Options,
    choose_accumulation,
    choose_compiler,
    choose_loading,
    choose_plugins,
    choose_project,
    choose_rng_types,
    overlay_arguments,
    refuse_arguments,
)
from zero_plugin.loop.checkpoints import Checkpoints, LoadHook, SaveHook, add_hook
from zero_plugin.loop.optimizer import AcceleratedOptimizer
from zero_plugin.loop.prepared import Prepared
from zero_plugin.loop.run import Run, open_configurations
from zero_plugin.loop.scheduler import AcceleratedScheduler
from zero_plugin.loop.state import newest_accelerator, newest_run, show_run
from zero_plugin.loop.training_loop import LossScaler, TrainingLoop, refuse_lomo
from zero_plugin.loop.weights import Weights
from zero_plugin.trackers.choose import choose_trackers
from zero_plugin.trackers.trackers import GeneralTracker

__all__ = ["Accelerator"]


class Accelerator:
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
        step_scheduler_with_optimizer: a prepared scheduler moves with the optimizer only; else at each of its calls.
        kwargs_handlers: arguments of torch's own objects; see `zero_plugin.config.plugins`.
        dynamo_backend, dynamo_plugin: compile models, by the compiler's name or with all arguments.
        deepspeed_plugins: the same as `deepspeed_plugin`.
        config: path of a launch YAML or a DeepSpeed JSON, or a dict with either content.
        even_batches: complete the last step of an epoch with its first samples, so that every process has a full batch.
        shard_iterable: `never` takes iterable data sets to give each process and worker its own samples; `auto` shares
            those out that are not known to.

    Attributes:
        log_with: the trackers that are asked for: classes of known ones, and the script's own objects.
        state, gradient_state: what Accelerate's scripts look up.
        parallelism_config, torch_device_mesh, fp8_backend: None, for libraries that ask: data are divided, models only
            by ZeRO, and there is no fp8.
        is_fsdp2, is_composable_parallelism_enabled, has_lomo_optimizer: False likewise.
        should_save_model: True: no process group holds a copy that is not to be saved.

    Raises:
        ConfigError: everything that is wrong with the configuration.
        LaunchError: the environment does not describe a whole process group.
        StrategyError: what was asked for cannot run here.
    """

    parallelism_config: None = None
    torch_device_mesh: None = None
    fp8_backend: None = None
    is_fsdp2 = False
    is_composable_parallelism_enabled = False
    has_lomo_optimizer = False
    should_save_model = True
    _triggered = False

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
        options = Options(
            device_placement=device_placement,
            loading=choose_loading(dataloader_config, split_batches=split_batches, even_batches=even_batches),
            accumulation=choose_accumulation(gradient_accumulation_plugin, gradient_accumulation_steps),
            step_scheduler_with_optimizer=step_scheduler_with_optimizer,
            rng_types=choose_rng_types(rng_types),
            project=choose_project(project_config, project_dir),
            handlers=sort_handlers(kwargs_handlers),
            shard_iterable=shard_iterable,
        )
        self.log_with = choose_trackers(log_with, options.project.logging_dir)
        configurations = open_configurations(
            config,
            choose_plugins(deepspeed_plugin, deepspeed_plugins),
            newest_run(),
            partial(overlay_arguments, mixed_precision=mixed_precision, cpu=cpu, options=options),
        )
        compiler = choose_compiler(dynamo_backend, dynamo_plugin, configurations.document)
        options.handlers = replace(options.handlers, compiler=compiler)
        self._run = Run(configurations, options)
        self._prepared = Prepared(self._run)
        self._loop = TrainingLoop(self._run, self._prepared)
        self._weights = Weights(self._run, self._prepared)
        self._checkpoints = Checkpoints(self._run, self._prepared, self._weights.collect)
        self._run.begin(self._prepared)
        self.state, self.gradient_state = show_run(self, options.accumulation.to_kwargs())

    # ---- the processes -----------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self._run.device

    @property
    def distributed_type(self) -> DistributedType:
        """How the processes work together, under Accelerate's names."""
        return self._run.distributed_type

    @property
    def num_processes(self) -> int:
        """Processes of the run."""
        return self._run.num_processes

    @property
    def process_index(self) -> int:
        """This process among all, from 0."""
        return self._run.process_index

    @property
    def local_process_index(self) -> int:
        """This process on its machine, from 0."""
        return self._run.local_process_index

    @property
    def is_main_process(self) -> bool:
        """Whether this is process 0."""
        return self._run.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is its machine's process 0."""
        return self._run.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last process."""
        return self._run.is_last_process

    @property
    def use_distributed(self) -> bool:
        """Whether several processes run."""
        return self._run.use_distributed

    @property
    def multi_device(self) -> bool:
        """Whether several GPUs compute, without ZeRO."""
        return self._run.multi_device

    def wait_for_everyone(self) -> None:
        """Return when every process has come here."""
        self._run.wait_for_everyone()

    def print(self, *values: Any, **kwargs: Any) -> None:
        """`print`, once on every machine."""
        self._run.print(*values, **kwargs)

    def main_process_first(self) -> AbstractContextManager[None]:
        """What is inside runs on the main process, then on all others at once; collective.

        If it raises on the main process, the others come in all the same, and see for themselves.
        """
        return self._run.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """What is inside runs on each machine's main process, then on all others at once; collective.

        If it raises on a machine's main process, the others come in all the same, and see for themselves.
        """
        return self._run.local_main_process_first()

    def on_main_process(self, function: Function | None = None) -> Function:
        """Decorator: the function runs on the main process; elsewhere it returns None."""
        return self._run.on_main_process(function)

    def on_local_main_process(self, function: Function | None = None) -> Function:
        """Decorator: the function runs on each machine's main process; elsewhere it returns None."""
        return self._run.on_local_main_process(function)

    def on_last_process(self, function: Function | None = None) -> Function:
        """Decorator: the function runs on the last process; elsewhere it returns None."""
        return self._run.on_last_process(function)

    def on_process(self, function: Function | None = None, process_index: int | None = None) -> Function:
        """Decorator: the function runs on process `process_index`, and wherever there is one process only."""
        return self._run.on_process(function, process_index)

    def on_local_process(self, function: Function | None = None, local_process_index: int | None = None) -> Function:
        """Decorator: the function runs on each machine's process `local_process_index`, or on the only process."""
        return self._run.on_local_process(function, local_process_index)

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> AbstractContextManager[Any]:
        """This process's consecutive share of `inputs`, which is the same on every process; not collective.

        Args:
            inputs: a list, tuple or other sequence, a tensor or array (by its first dimension), a `datasets.Dataset`,
                or a dict of these, all of one length. Strings are not divided.
            apply_padding: repeat the last element where a share is shorter, so that results can be gathered; tensors
                are then on this process's device.

        Raises:
            LoopError: it cannot be divided, or the values of a dict differ in length.
        """
        return self._run.split_between_processes(inputs, apply_padding)

    # ---- what it was told --------------------------------------------------------------------------------------------

    @property
    def document(self) -> Document:
        """What was asked for, with every value's origin."""
        return self._run.document

    @property
    def resolved(self) -> Resolved | None:
        """The configuration of the model prepared last, without open fields; None before."""
        return self._prepared.resolved

    @property
    def device_placement(self) -> bool:
        """Whether models and batches go to this process's device."""
        return self._run.options.device_placement

    @device_placement.setter
    def device_placement(self, value: bool) -> None:
        self._run.options.device_placement = value

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """How `prepare` shares loaders out."""
        return self._run.options.loading

    @dataloader_config.setter
    def dataloader_config(self, value: DataLoaderConfiguration) -> None:
        self._run.options.loading = value

    @property
    def split_batches(self) -> bool:
        """Whether the loaders' batch size is that of all processes together."""
        return self._run.options.loading.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether process 0 reads for all."""
        return self._run.options.loading.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether an epoch's last step is completed with its first samples."""
        return self._run.options.loading.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self._run.options.loading.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether shuffling depends on the seed and the epoch alone."""
        return self._run.options.loading.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied without waiting for it."""
        return self._run.options.loading.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether, after `load_state`, the coming loop goes on inside the epoch by itself."""
        return self._run.options.loading.use_stateful_dataloader

    @property
    def rng_types(self) -> list[str]:
        """Random states that every process gets from process 0 at the start of each epoch."""
        return self._run.options.rng_types

    @rng_types.setter
    def rng_types(self, value: list[str]) -> None:
        self._run.options.rng_types = value

    @property
    def gradient_accumulation_plugin(self) -> GradientAccumulationPlugin:
        """How gradients add up."""
        return self._run.options.accumulation

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """False: every call of a prepared scheduler's `step` advances it once."""
        return self._run.options.step_scheduler_with_optimizer

    @step_scheduler_with_optimizer.setter
    def step_scheduler_with_optimizer(self, value: bool) -> None:
        self._run.options.step_scheduler_with_optimizer = value

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """Where the run keeps what it writes."""
        return self._run.options.project

    @property
    def project_dir(self) -> str | os.PathLike[str] | None:
        """Folder of the run."""
        return self._run.options.project.project_dir

    @property
    def logging_dir(self) -> str | os.PathLike[str] | None:
        """Folder of local trackers."""
        return self._run.options.project.logging_dir

    @property
    def save_iteration(self) -> int:
        """Number of the next checkpoint that `save_state` names by itself."""
        return self._run.options.project.iteration

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The DeepSpeed configuration that the next `prepare` follows; None of a run without DeepSpeed.

        What a script writes into its `deepspeed_config` before that is followed.
        """
        return self._run.configurations.plugin

    @property
    def deepspeed_plugins(self) -> Mapping[str, DeepSpeedPlugin] | None:
        """All DeepSpeed configurations by name; None of a run without DeepSpeed."""
        return self._run.configurations.plugins or None

    @property
    def deepspeed_config(self) -> dict[str, Any] | None:
        """The `deepspeed_config` of `deepspeed_plugin`; None of a run without DeepSpeed."""
        return None if self.deepspeed_plugin is None else self.deepspeed_plugin.deepspeed_config

    @property
    def ddp_handler(self) -> DistributedDataParallelKwargs | None:
        """The arguments of DistributedDataParallel; None where none were given."""
        return self._run.options.handlers.ddp

    @property
    def scaler_handler(self) -> GradScalerKwargs | None:
        """The arguments of the loss scale; None where none were given."""
        return self._run.options.handlers.scaler

    @property
    def init_handler(self) -> InitProcessGroupKwargs | None:
        """The arguments of the process group; None where none were given."""
        return self._run.options.handlers.process_group

    @property
    def autocast_handler(self) -> AutocastKwargs | None:
        """The arguments of autocast; None where none were given."""
        return self._run.options.handlers.autocast

    @property
    def profile_handler(self) -> ProfileKwargs | None:
        """The arguments of the profiler; None where none were given."""
        return self._run.options.handlers.profile

    def maybe_context_parallel(self, *_: Any, **__: Any) -> AbstractContextManager[None]:
        """Nothing: sequences are not divided over processes."""
        return nullcontext()

    # ---- prepare -----------------------------------------------------------------------------------------------------

    def prepare(self, *objects: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Models, optimizers, loaders and schedulers, ready for the loop, in the order given; collective.

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
        prepared = self._prepared.prepare(objects, left)
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
        prepared: nn.Module = self._prepared.prepare((model,), left, only_evaluates=evaluation_mode)[0]
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> AcceleratedOptimizer:  # noqa: ARG002
        """`prepare` for an optimizer by itself; collective. Its states are where its parameters are."""
        prepared: AcceleratedOptimizer = self._prepared.prepare((optimizer,), set())[0]
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """`prepare` for a scheduler by itself; collective."""
        prepared: AcceleratedScheduler = self._prepared.prepare((scheduler,), set())[0]
        return prepared

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: SliceFunction | None = None,
    ) -> DataLoaderAdapter:
        """This process's part of a DataLoader; one that is prepared already is returned as it is.

        Args:
            data_loader: over a map-style or an iterable data set.
            device_placement: put batches on this process's device; None as the Accelerator was told.
            slice_fn_for_dispatch: divides a step's batch under `dispatch_batches`; see `DataLoaderDispatcher`.

        Raises:
            ConfigError, LoopError: see `prepare_loader`.
        """
        return self._prepared.prepare_loader(
            data_loader, is_placed=device_placement, slice_function=slice_fn_for_dispatch
        )

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
        """A loader over the same data that begins every epoch at batch `num_batches` of this process."""
        return skip_first_batches(dataloader, num_batches)

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
        self._prepared.free()
        return released

    clear = free_memory

    def _stays(self, placed: bool | None) -> bool:
        return not (self.device_placement if placed is None else placed)

    # ---- the loop ----------------------------------------------------------------------------------------------------

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step; settable, from the next window on, in the loader's own batches.

        Where memory ran out before, each of the loader's batches comes as several micro-batches, and the number is as
        many times what was set.

        Raises:
            ConfigError: it is set to another number than file or flag say.
            LaunchError: fewer processes are left than were meant, and cannot share out the number that is set.
        """
        return self._prepared.window.steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self._loop.resize_windows(steps)

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch ends its window, so that `optimizer.step()` acts.

        Of several models, it is said of the one whose micro-batch this is: named in `accumulate`, or reached by the
        last `backward`.

        A loop may set it, instead of calling `accumulate`: False before a micro-batch that does not end the window, and
        True before the one that does.
        """
        return self._prepared.window.ends_here

    @sync_gradients.setter
    def sync_gradients(self, ends: bool) -> None:
        self._loop.decide_windows(ends)

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """One micro-batch: gradients add up, and `step()` acts in the window's last one only.

        Args:
            *models: whose micro-batch it is; all that are trained where none is named. Models that are not trained may
                be named too.

        Raises:
            LoopError: of several trained models, one is named that is not prepared.
        """
        return self._loop.accumulate(models)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Add the gradients of `loss`, divided by the size of the accumulation window. It never steps.

        Every prepared model whose trained parameters the loss depends on gets its gradients, and keeps them until its
        optimizer's `step` or `zero_grad`, as in plain torch. Where none was prepared with its optimizer, this is
        torch's own backward, said once.

        Args:
            loss: scalar, or with `gradient` of its shape.
            **kwargs: as for `Tensor.backward`: `gradient`, `retain_graph`, `create_graph`, `inputs`.

        Raises:
            LoopError: it is no tensor, has several elements or no graph; gradients came from elsewhere; the loss
                reaches a module that was not prepared, or no prepared one; with accumulation and without `accumulate`,
                it reaches several models.
        """
        self._loop.backward(loss, **kwargs)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the coming step's gradients and return their norm before clipping (scalar, fp32), at once.

        Called inside a window, where the step's gradients are not complete, it does nothing and returns nan.

        Args:
            parameters: of one prepared model.
            max_norm: largest norm; `inf` only measures.
            norm_type: 2, or under DDP and on one device any other.

        Raises:
            ConfigError: the configuration's `gradient_clipping` is another number.
            LoopError: the parameters are not a prepared model's, or under ZeRO a part of them or another norm.
        """
        return self._loop.clip_norm(parameters, float(max_norm), float(norm_type))

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamp each number of the coming step's gradients to ±`clip_value`; inside a window, nothing happens.

        Args:
            parameters: of prepared models.
            clip_value: the largest magnitude.

        Raises:
            LoopError: under ZeRO, whose gradients are partitioned.
        """
        self._loop.clip_values(parameters, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Under fp16, take the loss scale out of the coming step's gradients, before the script looks at them.

        `clip_grad_norm_` and `clip_grad_value_` do so by themselves. Without a loss scale, and under ZeRO, where the
        gradients cannot be seen, nothing happens.

        Args:
            optimizer: a prepared optimizer, or several; None for all.
        """
        self._loop.unscale(optimizer)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of any prepared optimizer was skipped."""
        return any(t.optimizer is not None and t.optimizer.step_was_skipped for t in self._prepared.trained)

    def no_sync(self, model: nn.Module | None = None) -> AbstractContextManager[None]:
        """Backwards inside stay local where the strategy can; harmless where it cannot."""
        return self._loop.no_sync(model)

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """The next backward inside averages gradients over the processes, though the forward ran inside `no_sync`.

        Args:
            model: a prepared one.
        """
        return self._loop.reduce_next_backward(model)

    def join_uneven_inputs(
        self, joinables: Iterable[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Under DDP, let processes that run out of batches follow the others' reductions, until the last is through.

        Prepared loaders end together by themselves: what this serves is loaders that were not prepared. Where nothing
        is uneven, it changes nothing; where it has no effect, as under ZeRO, it warns.

        Args:
            joinables: prepared models.
            even_batches: for the prepared loaders, inside; None leaves them as they are.
        """
        return self._loop.join_uneven_inputs(joinables, even_batches)

    def lomo_backward(self, loss: Tensor, learning_rate: float) -> NoReturn:  # noqa: ARG002
        """Refuse: LOMO updates weights within backward, where nothing is averaged, accumulated or clipped.

        Raises:
            LoopError: always.
        """
        refuse_lomo()

    # ---- 16-bit arithmetic, and the profiler -------------------------------------------------------------------------

    @property
    def mixed_precision(self) -> str:
        """`no`, `fp16` or `bf16`; before `prepare`, what a model that is prepared now would get."""
        return self._run.expected_precision() if self.resolved is None else self.resolved.precision

    @property
    def native_amp(self) -> bool:
        """Whether the run computes in a 16-bit type."""
        return self.mixed_precision != "no"

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scale; None without fp16."""
        return LossScaler(self._prepared, self._loop) if self.mixed_precision == "fp16" else None

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[None]:
        """Compute in the run's 16-bit type inside, as a prepared model does by itself.

        Under ZeRO it changes nothing: weights are in that type, what a model returns is fp32, and what the script
        computes of that stays fp32.

        Args:
            autocast_handler: for this context; None takes the one from `kwargs_handlers`.
        """
        return self._run.strategy.autocast(self.mixed_precision, autocast_handler or self.autocast_handler)

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[profile]:
        """torch's profiler, running inside; with a schedule, call its `step()` after each step of the loop.

        Args:
            profile_handler: for this context; None takes the one from `kwargs_handlers`. Its `output_trace_dir` gets
                one Chrome trace of each process, `profile_<process>.json`.
        """
        return self._run.profile(profile_handler or self.profile_handler or ProfileKwargs())

    # ---- tensors of all processes; all are collective, but for set_trigger -------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Tensors of all processes, joined along their first dimension; containers keep their shape.

        A 0-dimensional tensor counts as one row, on one process too: shape (processes,).
        """
        return collectives.gather(tensor)

    def reduce(self, tensor: Any, reduction: Reduction = "sum", scale: float = 1.0) -> Any:
        """The `sum`, `mean` or `max` of each tensor over all processes, or its own (`none`), times `scale`."""
        return collectives.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Tensors padded along `dim` to the longest among the processes, behind or in front."""
        return collectives.pad_across_processes(tensor, dim, pad_index, pad_first)

    def broadcast(self, tensor: Any, from_process: int = 0) -> Any:
        """Tensors of process `from_process`, on every process; shapes and dtypes are the same everywhere before."""
        return collectives.broadcast(tensor, from_process)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Like `gather` in a loop over a prepared loader, without the samples repeated to make batches even."""
        return gather_for_metrics(input_data, RUNNING.current, use_gather_object)

    def set_trigger(self) -> None:
        """Let the next `check_trigger` be true on every process; not collective."""
        self._triggered = True

    def check_trigger(self) -> bool:
        """Whether any process has called `set_trigger` since the last check."""
        if triggered := any_process(self._triggered):
            self._triggered = False
        return triggered

    # ---- weights -----------------------------------------------------------------------------------------------------

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The user's own module inside a prepared model.

        Args:
            model: prepared, or wrapped by the user.
            keep_fp32_wrapper: leave its forward under autocast; else a prepared model's copy with the same weights is
                given, which has the class' own and can be pickled, and the prepared one trains on.
            keep_torch_compile: of a model that the user compiled, give the compiled one.
        """
        return self._weights.unwrap(model, keep_fp32_wrapper, keep_torch_compile)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor] | None:
        """Whole weights and buffers in host memory, in the type they are trained in; collective.

        Of a model with PEFT adapters, only the adapters' and what else is trained: the frozen base is not gathered.

        Args:
            model: prepared, or not.
            unwrap: False gives the names that the prepared model has, with `module.` before them where it is wrapped.

        Returns:
            The dict on the main process, None on the others, whatever the strategy.
        """
        return self._weights.collect(model, unwrap)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | Path,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
        *,
        trainable_only: bool = False,
        dtype: torch.dtype | str | None = None,
    ) -> None:
        """Write the weights as a Hugging Face-style folder of safetensors; collective: each process writes its part.

        A transformers model's folder loads with `from_pretrained`; of a model with PEFT adapters only they are written,
        in PEFT's own layout. Beside them, `resolved_config.json` says how the model was trained: every value and where
        it came from. An error leaves a model that was in the folder as it was.

        Args:
            model: prepared, or not.
            save_directory: made if it is missing.
            max_shard_size: largest size of one file, e.g. `5GB`.
            safe_serialization: only True.
            trainable_only: write the parameters with `requires_grad` alone, without configuration files; they load over
                the model that they were trained from: `load_weights(model, folder, strict=False)`.
            dtype: of floating-point parameters in the files: `fp32`, `bf16`, `fp16` or torch's own. They are converted
                from the optimizer's copies, so `fp32` gives the masters of 16-bit weights exactly. Absent, it is the
                type that each is trained in. Buffers keep theirs.

        Raises:
            LoopError: pickles are asked for; the model is partitioned and was not prepared; a tensor has no elements;
                or there is none to write.
            CheckpointError: a process cannot write, or `dtype` needs masters that cannot be reached.
            ConfigError: `max_shard_size` or `dtype` is none.
        """
        self._weights.save_model(
            model, save_directory, max_shard_size, safe_serialization, trainable_only=trainable_only, dtype=dtype
        )

    def whole_weights(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Inside, the weights of prepared models can be read and written as in plain torch; collective.

        For averages of weights (EMA, a mean teacher), weights that are clipped, `load_state_dict` between steps. Under
        ZeRO the optimizer goes on from what was written; at stage 3 parameters are whole inside, on every process, and
        what process 0 wrote stays. Every process has to write the same.

        Args:
            *models: prepared ones.

        Raises:
            LoopError: a model is not prepared, or its weights lie on NVMe.
        """
        return self._weights.whole_weights(*models)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """`torch.save` on the main process only.

        Args:
            obj: what to save.
            f: path, or file opened for writing.
            safe_serialization: write `obj`, a dict of tensors, as safetensors to the path `f`; each shared one once.

        Raises:
            LoopError: a tensor is partitioned, so that no process has it.
        """
        self._weights.save_object(obj, f, safe_serialization)

    def init_model(
        self, weights: str | os.PathLike[str] | None = None, *, strict: bool = True
    ) -> AbstractContextManager[list[WeightsReport]]:
        """A model made inside is never whole in any process, where the strategy partitions parameters (ZeRO stage 3).

        Without `weights` its values are those that it would have outside. With them, its parameters have no values and
        take no memory (they are on the meta device) until it is complete; then each process reads its part of each.
        Where nothing is partitioned, each reads the whole model once, straight to its device. Buffers are computed as
        always.

        transformers' `from_pretrained` and `from_config` need no such context after `Accelerator()`, unless the
        configuration says `zero3_init_flag: false`; there `from_config` draws other random values than outside.

        Args:
            weights: a folder of safetensors (of transformers, `save_model` or `save_state`), or one file. All models
                made inside, which no other one holds, get their weights there.
            strict: see `load_weights`. With False, parameters that are not in the files get what a new model draws.

        Yields:
            A list that holds one report for each model, once the context has ended.

        Raises:
            CheckpointError: as `load_weights`; of a bad folder before anything is built.
            LoopError: no model was made inside.
        """
        return self._weights.init_model(weights, strict=strict)

    def load_weights(self, model: nn.Module, weights: str | os.PathLike[str], *, strict: bool = True) -> WeightsReport:
        """Read weights into a model, each process just the bytes that it keeps; collective.

        They are converted to the type that the model has. Of a prepared model the optimizer's 32-bit copies come from
        the file too, not out of 16-bit weights; its states stay as they are.

        Args:
            model: plain, made inside `init_model`, on the meta device, or prepared.
            weights: a folder of safetensors (of transformers, `save_model` or `save_state`), or one file. Names are the
                model's own; transformers' older names and other layouts are for `from_pretrained`.
            strict: every tensor has to have its counterpart. False leaves the others as they are, or initialises what
                has no values yet, and says so.

        Returns:
            Which tensors were loaded, which are missing, unexpected or of another shape.

        Raises:
            CheckpointError: on every process: names or shapes do not fit, all of them told, and nothing was written; or
                a file is missing or damaged.
            MachineError: host memory does not hold the model for each process of a machine.
        """
        return self._weights.load(model, Path(weights), strict=strict)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,  # noqa: ARG002 - nothing here is ever written with pickle
        *,
        total_limit: int | None = None,
        max_shard_size: int | str = "10GB",
        asynchronous: bool = False,
        **options: Any,
    ) -> Path:
        """Write all that the training goes on from, on any number of processes and any strategy; collective.

        Models, optimizers, schedulers, loss scale, counters, random states of all processes, places of the loaders, and
        registered objects: see the README, "Checkpoints". The folder is complete, or it is not there.

        With `asynchronous`, it returns as soon as what a script may change is copied into host memory. What only a step
        changes (the optimizers' states and, under ZeRO, their own copy of the weights) is copied behind the next
        forward and backward, and a step waits for that; then a thread writes the copy while the training goes on. The
        next `save_state` or `load_state`, `wait_for_save`, `end_training` and the end of the process wait until it is
        complete. Each process keeps the memory of its copy for the next one, until `free_memory` or `end_training`.

        Args:
            output_dir: with `ProjectConfiguration(automatic_checkpoint_naming=True)` it is
                `project_dir/checkpoints/checkpoint_<iteration>`, whatever is given here; where a run has used that
                number, the first one above all that runs have used there.
            safe_serialization: no difference: safetensors and JSON always.
            total_limit: after success, remove the oldest of this run's checkpoints with the same name but for the
                number; absent, `ProjectConfiguration(total_limit=…)` holds for automatic names. A launch, its restarts,
                and launches that resume from its newest checkpoint are one run.
            max_shard_size: largest size of a weight file, e.g. `5GB`.
            asynchronous: write it behind the training; where the copy does not fit the memory of some machine, a line
                says so, and it is complete at the return all the same.
            **options: refused; Accelerate hands them to DeepSpeed.

        Returns:
            The folder; with `asynchronous`, where it will be.

        Raises:
            CheckpointError: it cannot be written, and nothing else has changed; or the one before, which was written
                behind the training, could not be, and this one is not begun. On every process.
            TypeError: `options` are given.
        """
        return self._checkpoints.save(
            output_dir,
            total_limit=total_limit,
            max_shard_size=max_shard_size,
            asynchronous=asynchronous,
            options=options,
        )

    def wait_for_save(self) -> Path | None:
        """Wait until what `save_state(asynchronous=True)` has begun is complete; collective.

        Returns:
            The checkpoint; None if none was being written.

        Raises:
            CheckpointError: on every process: it could not be written; older ones are as they were.
        """
        return self._checkpoints.wait()

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,  # noqa: ARG002 - torch.load is not used
        *,
        strict: bool = True,
        weights_only: bool = False,
        verify: bool = False,
        map_location: str | None = None,
        **options: Any,
    ) -> LoadReport:
        """Go on from a checkpoint that `save_state` wrote, by whatever strategy and processes; collective.

        The loaders draw the interrupted epoch's order again, from its first batch:
        `skip_first_batches(loader, report.batches[i])` begins where it stopped. With
        `DataLoaderConfiguration(use_stateful_dataloader=True)` they begin there by themselves.

        Args:
            input_dir: a checkpoint, or a folder of `checkpoint_<number>`s, of which the newest complete one is loaded,
                this run's own where it has any; absent: that of `project_dir/checkpoints`, where naming is automatic.
            load_kwargs: accepted for scripts that give it.
            strict: tensors that only the model or only the checkpoint has are an error.
            weights_only: load the models' weights, and nothing else.
            verify: read everything once more, and compare it with the checksums.
            map_location: `cpu` or `on_device`, accepted for scripts that give it: tensors are read to where they live.
            **options: refused; Accelerate hands them to DeepSpeed.

        Returns:
            What was restored, and what was not.

        Raises:
            CheckpointError: it is damaged, and which is the newest good one before it; or it does not fit; or a save in
                the background has failed, and nothing is loaded yet.
        """
        return self._checkpoints.load(
            input_dir,
            strict=strict,
            weights_only=weights_only,
            verify=verify,
            map_location=map_location,
            options=options,
        )

    def resume(self, folder: str | os.PathLike[str] | None = None) -> LoadReport | None:
        """Go on from the newest complete checkpoint, where this run is one that goes on; collective, after `prepare`.

        It is one after a restart by the launcher (`--max_restarts`, or for want of memory), where only what this run
        has saved counts, and from the first start with `--auto_resume` (`auto_resume: true` in the config), where the
        newest one counts, whose run this launch joins. Without that, what a launch before has saved is not loaded, and
        a line says which checkpoint.

        The loaders go on inside the interrupted epoch by themselves:

            resumed = accelerator.resume()
            for epoch in range(resumed.epochs[0] if resumed else 0, epochs):
                for batch in loader:
                    ...

        Args:
            folder: holds `checkpoint_<number>`s, or is one; absent: that of `project_dir/checkpoints`, where naming is
                automatic.

        Returns:
            What was restored; None where the run begins anew: it does not go on, or no checkpoint is there yet.

        Raises:
            CheckpointError: the checkpoints that are there are all damaged, or do not fit; training is not begun anew.
        """
        return self._checkpoints.resume(folder)

    def stop_requested(self) -> bool:
        """Whether some process was asked to stop by SIGTERM, as schedulers do; the same on every process; collective.

        From the first call on SIGTERM does not end this process: the loop has to ask after each step, save and end.
        The launcher waits `--grace_period` seconds for that, and returns 143.

            if accelerator.stop_requested():
                accelerator.save_state()
                break

        Raises:
            LoopError: it is first called outside of the main thread, where no signal can be waited for.
        """
        return self._run.stop_requested()

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load these too: each has `state_dict()`, of what `encode_nested` lists, and `load_state_dict()`.

        The main process' are saved, and loaded by every process.

        Raises:
            ValueError: an object has not both.
        """
        self._checkpoints.register(objects)

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Call `hook(models, weights, output_dir)` on every process before `save_state` writes.

        Args:
            hook: gets the prepared models; their whole weights (on the main process; elsewhere empty dicts), which are
                collected for it; and the folder that is being written, where it may write files. What it removes from
                the list of weights on the main process is not written again.
        """
        return add_hook(self._checkpoints.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Call `hook(models, input_dir)` on every process before `load_state` reads.

        Args:
            hook: gets the prepared models and the checkpoint's folder. The weights of a model that it removes from the
                list are taken to be loaded by it.
        """
        return add_hook(self._checkpoints.load_hooks, hook)

    # ---- trackers; they act on the main process and return at once on others -----------------------------------------

    @property
    def trackers(self) -> list[GeneralTracker]:
        """Those that `init_trackers` has started."""
        return self._run.trackers.started

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Start the trackers of `log_with`.

        Args:
            project_name: of the run, as each tracker understands it.
            config: hyper-parameters to keep.
            init_kwargs: further arguments by tracker, e.g. `{"wandb": {"mode": "offline"}}`.

        Arguments for a tracker that `log_with` does not name have no effect, which a line says: scripts pass them
        whatever they are told to log with.
        """
        self._run.trackers.start(self.log_with, project_name, config, init_kwargs or {})

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """The started tracker of that name; one that does nothing on other processes, and where none is started.

        Args:
            name: e.g. `wandb`.
            unwrap: what the tracker writes through, in place of the tracker.

        Raises:
            LoopError: others are started, and none of that name.
        """
        return self._run.trackers.find(name, unwrap=unwrap)

    def log(
        self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Write measurements to every started tracker.

        Args:
            values: numbers, strings or dicts of numbers by name; tensors and arrays count as the numbers they hold.
            step: which step they are of.
            log_kwargs: further arguments by tracker, for its `log`.
        """
        self._run.trackers.log(values, step, log_kwargs or {})

    def metrics(self, units: int = 0, unit: str = "tokens") -> dict[str, float]:
        """What the last optimizer step tells of itself, for `log`; not collective, so one process may call it alone.

        Args:
            units: what this process has handled since the last call, e.g. tokens; 0 for not to say.
            unit: what they are.

        Returns:
            `lr` (of the first group); `grad_norm` (before clipping) where the step was clipped or measured; under fp16
            `loss_scale`, and `skipped_steps` since the last applied one; `tokens_per_second` of all processes, taken
            to be as fast as this one; `memory_available_gb`, of the GPU or of the machine. Of several models, each
            but the first has its number behind its names.
        """
        return self._prepared.measure() | self._run.meter.read(units, unit)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def end_training(self) -> None:
        """Close every session and the process group; collective. It also runs at the end of the process.

        What cannot be closed does not keep the rest open, nor the other processes waiting: its exception comes last.

        Raises:
            CheckpointError: a save in the background has failed; all is closed nevertheless.
        """
        self._run.end()

    # ---- Accelerate's names of what is prepared, which scripts and libraries look into -------------------------------

    @property
    def _models(self) -> list[nn.Module]:
        return self._prepared.models

    @property
    def _optimizers(self) -> list[AcceleratedOptimizer]:
        return self._prepared.optimizers

    @property
    def _schedulers(self) -> list[AcceleratedScheduler]:
        return self._prepared.schedulers

    @property
    def _dataloaders(self) -> list[DataLoaderAdapter]:
        return self._prepared.dataloaders

    @property
    def _custom_objects(self) -> list[Any]:
        return self._checkpoints.objects

    @property
    def _save_model_state_pre_hook(self) -> OrderedDict[int, SaveHook]:
        return self._checkpoints.save_hooks

    @property
    def _load_model_state_pre_hook(self) -> OrderedDict[int, LoadHook]:
        return self._checkpoints.load_hooks

    def __deepcopy__(self, _: dict[int, Any]) -> Accelerator:
        return self  # objects that hold one are copied for the same run

    def __reduce__(self) -> tuple[Callable[[], Accelerator], tuple[()]]:
        return newest_accelerator, ()  # so are those that are pickled, as `datasets` does to see whether they changed
