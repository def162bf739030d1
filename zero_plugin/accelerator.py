"""The public API: `Accelerator` reads the configuration, prepares the objects of a training loop, and trains them."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.profiler import profile
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from zero_plugin.checkpoint.load import LoadReport
from zero_plugin.checkpoint.load_weights import WeightsReport
from zero_plugin.config.choices import DistributedType, DynamoBackend, RNGType
from zero_plugin.config.document import Document
from zero_plugin.config.handlers import (
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
from zero_plugin.config.parallelism import ParallelismConfig
from zero_plugin.config.plugins import DeepSpeedPlugin
from zero_plugin.config.resolve.facts import Resolved
from zero_plugin.data.active import RUNNING
from zero_plugin.data.batches import gather_for_metrics
from zero_plugin.data.dispatch import SliceFunction
from zero_plugin.data.loader import DataLoaderAdapter, skip_first_batches
from zero_plugin.data.stream import ShardIterable
from zero_plugin.distributed import collectives
from zero_plugin.distributed.collectives import Reduction, any_process
from zero_plugin.distributed.processes import Function
from zero_plugin.loop import backward, clip
from zero_plugin.loop.accumulation import Accumulation
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
from zero_plugin.loop.loss_scaler import LossScaler
from zero_plugin.loop.optimizer import AcceleratedOptimizer
from zero_plugin.loop.prepared import Prepared, refuse_lomo
from zero_plugin.loop.run import Run, open_configurations
from zero_plugin.loop.scheduler import AcceleratedScheduler
from zero_plugin.loop.state import newest_accelerator, newest_run, show_run
from zero_plugin.loop.weights import Weights
from zero_plugin.strategies.torch_strategies import TorchStrategy
from zero_plugin.trackers.trackers import GeneralTracker, choose_trackers

if TYPE_CHECKING:
    from typing_extensions import TypeVarTuple, Unpack

    Objects = TypeVarTuple("Objects")

__all__ = ["Accelerator"]

T = TypeVar("T")


class Accelerator:
    """A trainer for ZeRO 0-3, DDP or one device: the configuration selects one, the training loop stays the same.

    The configuration comes from the launcher or from `config`; without either it is empty. Arguments in code set the
    values that the configuration leaves open. An argument is an error if it contradicts an explicit value of the
    configuration, or cannot be applied.

        accelerator = Accelerator(gradient_accumulation_steps=4)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    Args:
        device_placement: move models and batches to this process's device.
        split_batches: the batch size of a DataLoader counts the samples of all processes together, not of each process.
        mixed_precision: `no`, `fp16`, `bf16`, or `auto` for the precision that suits the device.
        gradient_accumulation_steps: micro-batches per optimizer step.
        cpu: compute on the CPU even if a GPU is available.
        dataloader_config: how DataLoaders are sharded over the processes.
        deepspeed_plugin: a DeepSpeed configuration in code, or a dict of several by name;
            `state.select_deepspeed_plugin(name)` selects one.
        fsdp_plugin, torch_tp_plugin, megatron_lm_plugin: not supported; the error says what to write instead.
        rng_types: the random number generators that are synchronized over the processes at the start of each epoch:
            `generator`, `torch`, `cuda`.
        log_with: experiment trackers, by name or as objects.
        project_dir: the folder of the run.
        project_config: where the run writes its checkpoints and logs.
        gradient_accumulation_plugin: how gradients are accumulated.
        step_scheduler_with_optimizer: advance a prepared learning-rate scheduler only with applied optimizer steps; if
            False, at every call of its `step()`.
        kwargs_handlers: arguments of torch's own objects; see `zero_plugin.config.handlers`.
        dynamo_backend, dynamo_plugin: compile models, with the name of the backend or with all arguments.
        deepspeed_plugins: the same as `deepspeed_plugin`.
        parallelism_config: how many processes share each sample (`sp_size`); the configuration's key for this is
            `sequence_parallel_size`.
        config: path of a launch YAML or a DeepSpeed JSON file, or a dict with the content of either.
        even_batches: fill up the last batches of an epoch with samples from its beginning: every process has full
            batches.
        shard_iterable: `auto` shards an iterable dataset unless it is known to shard itself; `never` assumes that
            every iterable dataset already yields different samples in each process and worker.
        strategy: the class of your own strategy, instead of DDP or one device; see docs/own-strategy.md.

    Attributes:
        log_with: the configured trackers: classes of the built-in ones, and the script's own objects.
        state, gradient_state: Accelerate's state objects, for scripts that read them.
        parallelism_config, torch_device_mesh, fp8_backend: None, for libraries that read them. A prepared model takes
            complete samples and returns complete results, even if processes share samples; fp8 is not supported.
        is_fsdp2, is_composable_parallelism_enabled, has_lomo_optimizer: False, for the same reason.
        should_save_model: True, for libraries that read it.

    Raises:
        ConfigError: the configuration is invalid; the error lists all problems.
        LaunchError: the environment variables do not describe a complete process group.
        StrategyError: the configured strategy cannot run on this machine.
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
        parallelism_config: ParallelismConfig | None = None,
        *,
        config: str | Path | Mapping[str, Any] | None = None,
        even_batches: bool | None = None,
        shard_iterable: ShardIterable = "auto",
        strategy: type[TorchStrategy] | None = None,
    ) -> None:
        refuse_arguments(
            fsdp_plugin=fsdp_plugin, torch_tp_plugin=torch_tp_plugin, megatron_lm_plugin=megatron_lm_plugin
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
            strategy=strategy,
        )
        self.log_with = choose_trackers(log_with, options.project.logging_dir)
        in_code: Any = {"mixed_precision": mixed_precision, "cpu": cpu, "parallelism_config": parallelism_config}
        configurations = open_configurations(
            config,
            choose_plugins(deepspeed_plugin, deepspeed_plugins),
            newest_run(),
            partial(overlay_arguments, options=options, **in_code),
        )
        compiler = choose_compiler(dynamo_backend, dynamo_plugin, configurations.document)
        options.handlers = replace(options.handlers, compiler=compiler)
        self._run = Run(configurations, options)
        self._prepared = Prepared(self._run)
        self._accumulation = Accumulation(self._run, self._prepared)
        self._weights = Weights(self._run, self._prepared)
        self._checkpoints = Checkpoints(self._run, self._prepared, self._weights.collect)
        self._run.begin(self._prepared)
        self.state, self.gradient_state = show_run(self, options.accumulation.to_kwargs())

    # ---- the processes -----------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._run.device

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of distributed training, as Accelerate names it."""
        return self._run.distributed_type

    @property
    def num_processes(self) -> int:
        """The number of processes of the run (the world size)."""
        return self._run.num_processes

    @property
    def process_index(self) -> int:
        """The global rank of this process."""
        return self._run.process_index

    @property
    def local_process_index(self) -> int:
        """The local rank of this process on its machine."""
        return self._run.local_process_index

    @property
    def is_main_process(self) -> bool:
        """Whether this is global rank 0."""
        return self._run.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is local rank 0."""
        return self._run.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last global rank."""
        return self._run.is_last_process

    @property
    def use_distributed(self) -> bool:
        """Whether the run has more than one process."""
        return self._run.use_distributed

    @property
    def multi_device(self) -> bool:
        """Whether the run uses several GPUs without ZeRO."""
        return self._run.multi_device

    def wait_for_everyone(self) -> None:
        """Wait until every process has reached this call; collective."""
        self._run.wait_for_everyone()

    def print(self, *values: Any, **kwargs: Any) -> None:
        """Print on local rank 0 of every machine."""
        self._run.print(*values, **kwargs)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Return a context manager whose block runs on the main process first, then on all others; collective.

        If the block raises on the main process, the others still run the block.
        """
        return self._run.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Return a context manager whose block runs on each machine's local rank 0 first, then on others; collective.

        If the block raises on local rank 0, the others still run the block.
        """
        return self._run.local_main_process_first()

    def on_main_process(self, function: Function | None = None) -> Function:
        """Decorate a function to run on the main process; on other processes it returns None."""
        return self._run.on_main_process(function)

    def on_local_main_process(self, function: Function | None = None) -> Function:
        """Decorate a function to run on local rank 0 of each machine; on other processes it returns None."""
        return self._run.on_local_main_process(function)

    def on_last_process(self, function: Function | None = None) -> Function:
        """Decorate a function to run on the last process; on other processes it returns None."""
        return self._run.on_last_process(function)

    def on_process(self, function: Function | None = None, process_index: int | None = None) -> Function:
        """Decorate a function to run on global rank `process_index`, or on the only process."""
        return self._run.on_process(function, process_index)

    def on_local_process(self, function: Function | None = None, local_process_index: int | None = None) -> Function:
        """Decorate a function to run on each machine's local rank `local_process_index`, or on the only process."""
        return self._run.on_local_process(function, local_process_index)

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> AbstractContextManager[Any]:
        """Return a context manager that yields this process's contiguous part of `inputs`; not collective.

        Args:
            inputs: the same on every process: a list, tuple or other sequence, a tensor or array (split along its first
                dimension), a `datasets.Dataset`, or a dict of these, all of the same length. Strings are not split.
            apply_padding: repeat the last element if a part is shorter than the others, to let the script gather
                results; tensors are then moved to this process's device.

        Raises:
            LoopError: `inputs` cannot be split, or the values of a dict differ in length.
        """
        return self._run.split_between_processes(inputs, apply_padding)

    # ---- the configuration -------------------------------------------------------------------------------------------

    @property
    def document(self) -> Document:
        """The configuration as it was given, with the origin of every value."""
        return self._run.document

    @property
    def resolved(self) -> Resolved | None:
        """The resolved configuration of the last prepared model; None before the first one."""
        return self._prepared.resolved

    @property
    def device_placement(self) -> bool:
        """Whether models and batches are moved to this process's device."""
        return self._run.options.device_placement

    @device_placement.setter
    def device_placement(self, value: bool) -> None:
        self._run.options.device_placement = value

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """The settings by which `prepare` shards DataLoaders over the processes."""
        return self._run.options.loading

    @dataloader_config.setter
    def dataloader_config(self, value: DataLoaderConfiguration) -> None:
        self._run.options.loading = value

    @property
    def split_batches(self) -> bool:
        """Whether the batch size of a DataLoader counts the samples of all processes together."""
        return self._run.options.loading.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether the main process reads the batches and sends each process its part."""
        return self._run.options.loading.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether the last batches of an epoch are filled up with samples from its beginning."""
        return self._run.options.loading.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self._run.options.loading.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether the order of shuffled samples depends on the seed and the epoch only."""
        return self._run.options.loading.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the device asynchronously."""
        return self._run.options.loading.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether loaders automatically continue inside the interrupted epoch after `load_state`."""
        return self._run.options.loading.use_stateful_dataloader

    @property
    def rng_types(self) -> list[str]:
        """The random number generators that are synchronized with rank 0 at the start of each epoch."""
        return self._run.options.rng_types

    @rng_types.setter
    def rng_types(self, value: list[str]) -> None:
        self._run.options.rng_types = value

    @property
    def gradient_accumulation_plugin(self) -> GradientAccumulationPlugin:
        """The settings of gradient accumulation."""
        return self._run.options.accumulation

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Whether prepared schedulers advance with applied optimizer steps only, not at every call of `step()`."""
        return self._run.options.step_scheduler_with_optimizer

    @step_scheduler_with_optimizer.setter
    def step_scheduler_with_optimizer(self, value: bool) -> None:
        self._run.options.step_scheduler_with_optimizer = value

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """The folders that the run writes checkpoints and logs to, and how it names checkpoints."""
        return self._run.options.project

    @property
    def project_dir(self) -> str | os.PathLike[str] | None:
        """The folder of the run."""
        return self._run.options.project.project_dir

    @property
    def logging_dir(self) -> str | os.PathLike[str] | None:
        """The folder in which local trackers write."""
        return self._run.options.project.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next checkpoint with an automatic name."""
        return self._run.options.project.iteration

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The DeepSpeed configuration that the next `prepare` uses; None in a run without DeepSpeed.

        A script may change its `deepspeed_config` before that `prepare`.
        """
        return self._run.configurations.plugin

    @property
    def deepspeed_plugins(self) -> Mapping[str, DeepSpeedPlugin] | None:
        """All DeepSpeed configurations by name; None in a run without DeepSpeed."""
        return self._run.configurations.plugins or None

    @property
    def deepspeed_config(self) -> dict[str, Any] | None:
        """The `deepspeed_config` of `deepspeed_plugin`; None in a run without DeepSpeed."""
        return None if self.deepspeed_plugin is None else self.deepspeed_plugin.deepspeed_config

    @property
    def ddp_handler(self) -> DistributedDataParallelKwargs | None:
        """The given arguments of DistributedDataParallel, or None."""
        return self._run.options.handlers.ddp

    @property
    def scaler_handler(self) -> GradScalerKwargs | None:
        """The given arguments of the loss scale, or None."""
        return self._run.options.handlers.scaler

    @property
    def init_handler(self) -> InitProcessGroupKwargs | None:
        """The given arguments of `init_process_group`, or None."""
        return self._run.options.handlers.process_group

    @property
    def autocast_handler(self) -> AutocastKwargs | None:
        """The given arguments of autocast, or None."""
        return self._run.options.handlers.autocast

    @property
    def profile_handler(self) -> ProfileKwargs | None:
        """The given arguments of the profiler, or None."""
        return self._run.options.handlers.profile

    def maybe_context_parallel(self, *_: Any, **__: Any) -> AbstractContextManager[None]:
        """Return a context manager that does nothing: it exists for scripts that call Accelerate's."""
        return nullcontext()

    # ---- prepare -----------------------------------------------------------------------------------------------------

    @overload
    def prepare(self, single: T, /, *, device_placement: Sequence[bool | None] | None = None) -> T: ...

    @overload
    def prepare(
        self, *objects: Unpack[Objects], device_placement: Sequence[bool | None] | None = None
    ) -> tuple[Unpack[Objects]]: ...

    def prepare(self, *objects: object, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Prepare models, optimizers, DataLoaders and learning-rate schedulers for the training loop; collective.

        Pass a model and its optimizer (or `DummyOptim`) in one call; under ZeRO this is required. A model without an
        optimizer is not trained. Objects of other types, and objects that are already prepared, are returned unchanged.

            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

        Args:
            *objects: in any order.
            device_placement: one value for each object: whether to move the model, or the loader's batches, to this
                process's device; None takes the value given to `Accelerator`.

        Returns:
            The prepared objects, in the order of `objects`; a single object is returned without a tuple.

        Raises:
            ConfigError: the configuration cannot be completed, or contradicts the objects.
            LoopError: an object was already prepared as another object, a model was loaded with `device_map`, models
                share parameters, or an optimizer holds parameters of another model, or is passed after its model under
                ZeRO.
            ValueError: `device_placement` does not have one value for each object.
        """
        if device_placement is None:
            device_placement = [None] * len(objects)
        elif len(device_placement) != len(objects):
            raise ValueError(
                f"prepare() got {len(device_placement)} values of device_placement for {len(objects)} objects."
            )
        not_moved = {id(o) for o, placed in zip(objects, device_placement, strict=True) if self._stays(placed)}
        prepared = self._prepared.prepare(objects, not_moved)
        return prepared if len(prepared) != 1 else prepared[0]

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare one model; collective.

        Args:
            model: its optimizer may be prepared later, except under ZeRO.
            device_placement: False leaves the model on its current device.
            evaluation_mode: the model is never trained: no memory is allocated for its gradients.
        """
        not_moved = {id(model)} if self._stays(device_placement) else set()
        prepared: nn.Module = self._prepared.prepare((model,), not_moved, only_evaluates=evaluation_mode)[0]
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> AcceleratedOptimizer:  # noqa: ARG002
        """Prepare one optimizer; collective. `device_placement` has no effect: states follow the parameters."""
        prepared: AcceleratedOptimizer = self._prepared.prepare((optimizer,), set())[0]
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Prepare one learning-rate scheduler; collective."""
        prepared: AcceleratedScheduler = self._prepared.prepare((scheduler,), set())[0]
        return prepared

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: SliceFunction | None = None
    ) -> DataLoaderAdapter:
        """Prepare one DataLoader: the returned loader yields this process's part of the data.

        Args:
            data_loader: over a map-style or an iterable dataset. A prepared loader is returned unchanged.
            device_placement: move batches to this process's device; None takes the value given to `Accelerator`.
            slice_fn_for_dispatch: splits a batch over the processes under `dispatch_batches`; see
                `DataLoaderDispatcher`.

        Raises:
            ConfigError, LoopError: see `prepare_loader`.
        """
        return self._prepared.prepare_loader(
            data_loader, is_placed=device_placement, slice_function=slice_fn_for_dispatch
        )

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
        """Return a loader over the same data that skips this process's first `num_batches` batches of every epoch."""
        return skip_first_batches(dataloader, num_batches)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Check whether a `device_map` has distributed a module in `model` over several devices."""
        return any(len(getattr(module, "hf_device_map", None) or ()) > 1 for module in model.modules())

    def free_memory(self, *objects: Any) -> list[None]:
        """Release all prepared objects and their memory, to make room for another model.

        A background save still completes its checkpoint. Nothing is gathered: at stage 3 the user's module stays
        partitioned, with parameters of shape (0,). Read it inside `whole_weights`, or prepare it again.

            model, optimizer = accelerator.free_memory(model, optimizer)  # also drops the script's own references

        Args:
            *objects: the script's references.

        Returns:
            A list with None for each object.
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
        """Micro-batches per optimizer step. A new value takes effect at the next accumulation window.

        If memory ran out and the run was restarted with smaller micro-batches, each batch of the loader is split into
        several micro-batches, and this number is multiplied accordingly.

        Raises:
            ConfigError: the new value contradicts the configuration file or a flag.
            LaunchError: the run has lost processes, and the remaining ones cannot divide the new value.
        """
        return self._prepared.window.steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self._accumulation.resize_windows(steps)

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch is the last of its accumulation window: only then `optimizer.step()` acts.

        With several models, the value refers to the model that was passed to `accumulate`, or that the last `backward`
        reached.

        A loop may set this property instead of calling `accumulate`: to True before the micro-batch that ends the
        window, to False before the others.
        """
        return self._prepared.window.ends_here

    @sync_gradients.setter
    def sync_gradients(self, ends: bool) -> None:
        self._accumulation.decide_windows(ends)

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Return a context manager for one micro-batch; `optimizer.step()` acts only in the last one of a window.

            with accelerator.accumulate(model):
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

        Args:
            *models: the models that this micro-batch trains; by default all models with an optimizer. Models without an
                optimizer may be passed too.

        Raises:
            LoopError: several models are trained and one of `models` is not prepared.
        """
        return self._accumulation.accumulate(models)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Compute the gradients of `loss`, divided by the number of micro-batches in the accumulation window.

        Gradients accumulate in every prepared model that the loss depends on, until its optimizer's `step` or
        `zero_grad`, as in plain PyTorch. If no model was prepared with its optimizer, torch's own backward runs, which
        is logged once.

        Args:
            loss: a scalar, or a tensor of any shape with `gradient` of the same shape.
            **kwargs: as for `Tensor.backward`: `gradient`, `retain_graph`, `create_graph`, `inputs`.

        Raises:
            LoopError: `loss` is not a scalar tensor with a graph; gradients were computed by `loss.backward()`; the
                loss depends on parameters of a module that is not prepared, or on no prepared model; or the loss
                depends on several models while gradients accumulate without `accumulate`.
        """
        backward.backward(self._run, self._prepared, loss, **kwargs)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of the next optimizer step by their global norm; collective.

        Before the last micro-batch of an accumulation window the gradients are not complete: nothing is clipped, and
        the call returns nan.

        Args:
            parameters: the parameters of one prepared model.
            max_norm: the largest norm; `inf` only measures the norm.
            norm_type: the order of the norm; under ZeRO only 2.

        Returns:
            The norm before clipping: a scalar fp32 tensor.

        Raises:
            ConfigError: `gradient_clipping` in the configuration is another number.
            LoopError: the parameters do not belong to one prepared model; or, under ZeRO, they are only some of its
                parameters, or `norm_type` is not 2.
        """
        return clip.clip_norm(self._run, self._prepared, parameters, float(max_norm), float(norm_type))

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamp each element of the next step's gradients to [-`clip_value`, `clip_value`].

        Before the last micro-batch of an accumulation window nothing happens.

        Args:
            parameters: the parameters of prepared models.
            clip_value: the largest magnitude of an element.

        Raises:
            LoopError: under ZeRO, because gradients are partitioned.
        """
        clip.clip_values(self._run, self._prepared, parameters, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide the next step's gradients by the fp16 loss scale, before the script reads or changes them.

        `clip_grad_norm_` and `clip_grad_value_` do this themselves. The call has no effect without a loss scale, or
        under ZeRO: there scripts cannot read the gradients.

        Args:
            optimizer: a prepared optimizer or a list of them; None for all.
        """
        clip.unscale(self._prepared, optimizer)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of any prepared optimizer was skipped because gradients were not finite."""
        return any(t.optimizer is not None and t.optimizer.step_was_skipped for t in self._prepared.trained)

    def no_sync(self, model: nn.Module | None = None) -> AbstractContextManager[None]:
        """Return a context manager in which backwards do not average gradients, if the strategy supports that."""
        return self._accumulation.no_sync(model)

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context manager: the next backward averages gradients, even if the forward ran inside `no_sync`.

        Args:
            model: a prepared model.
        """
        return self._accumulation.reduce_next_backward(model)

    def join_uneven_inputs(
        self, joinables: Iterable[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Return a context manager for DDP with different numbers of batches per process; it enters torch's `Join`.

        Processes that run out of batches join the collective operations of the others until all have finished.
        Prepared loaders have the same number of batches on every process: use this for loaders that were not prepared.
        The context warns if it has no effect, for example under ZeRO.

        Args:
            joinables: prepared models.
            even_batches: overrides `even_batches` of the prepared loaders inside; None leaves it unchanged.
        """
        return self._accumulation.join_uneven_inputs(joinables, even_batches)

    def lomo_backward(self, loss: Tensor, learning_rate: float) -> NoReturn:  # noqa: ARG002
        """Refuse LOMO: it updates weights during the backward, without averaging, accumulation or clipping.

        Raises:
            LoopError: always.
        """
        refuse_lomo("lomo_backward()")

    # ---- 16-bit arithmetic, and the profiler -------------------------------------------------------------------------

    @property
    def mixed_precision(self) -> str:
        """`no`, `fp16` or `bf16`; before `prepare`, the precision that `prepare` would choose now."""
        return self._run.expected_precision() if self.resolved is None else self.resolved.precision

    @property
    def native_amp(self) -> bool:
        """Whether the run computes in a 16-bit dtype."""
        return self.mixed_precision != "no"

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scale, with the methods of `torch.amp.GradScaler`; None without fp16."""
        return LossScaler(self._prepared) if self.mixed_precision == "fp16" else None

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[None]:
        """Return a context manager in which operations run under `torch.autocast` in the run's 16-bit dtype.

        Prepared models do this themselves. Under ZeRO the context has no effect: weights are in the 16-bit dtype, a
        model's outputs are fp32, and the script computes with them in fp32.

        Args:
            autocast_handler: the arguments for this context; None takes those from `kwargs_handlers`.
        """
        return self._run.strategy.autocast(self.mixed_precision, autocast_handler or self.autocast_handler)

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[profile]:
        """Return a context manager that profiles with `torch.profiler.profile`.

        With a schedule, call `step()` of the profiler after each training step.

        Args:
            profile_handler: the arguments for this context; None takes those from `kwargs_handlers`. If
                `output_trace_dir` is set, each process writes a Chrome trace `profile_<rank>.json` into that folder.
        """
        return self._run.profile(profile_handler or self.profile_handler or ProfileKwargs())

    # ---- collective operations; all but set_trigger are collective ---------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Concatenate the tensors of all processes along their first dimension.

        A scalar tensor counts as one row: the result has shape (processes,), also with one process. With several
        processes the result has no gradients; torch.distributed.nn.functional.all_gather passes them.

        Args:
            tensor: a tensor, or a nested list, tuple or dict of tensors; the same structure is returned.
        """
        return collectives.gather(tensor)

    def reduce(self, tensor: Any, reduction: Reduction = "sum", scale: float = 1.0) -> Any:
        """Reduce each tensor over all processes by `sum`, `mean` or `max`, times `scale`; `none` only multiplies."""
        return collectives.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Pad tensors with `pad_index` along `dim` to the largest size on any process, at the end or at the start."""
        return collectives.pad_across_processes(tensor, dim, pad_index, pad_first)

    def broadcast(self, tensor: Any, from_process: int = 0) -> Any:
        """Return the tensors of rank `from_process` on every process; shapes and dtypes must agree on all processes."""
        return collectives.broadcast(tensor, from_process)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather in a loop over a prepared loader, without the samples that were repeated to fill up batches."""
        return gather_for_metrics(input_data, RUNNING.current, use_gather_object)

    def set_trigger(self) -> None:
        """Make the next `check_trigger` return True on every process; not collective."""
        self._triggered = True

    def check_trigger(self) -> bool:
        """Check whether any process has called `set_trigger` since the last check; collective."""
        if triggered := any_process(self._triggered):
            self._triggered = False
        return triggered

    # ---- weights -----------------------------------------------------------------------------------------------------

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the user's own module inside a prepared model.

        Nothing is gathered: at stage 3 its parameters are partitioned, of shape (0,). Read them inside `whole_weights`.

        Args:
            model: a prepared model, or a model that the user wrapped.
            keep_fp32_wrapper: keep the forward under autocast. If False, return a copy of the module that shares its
                weights, has the unmodified forward of its class, and can be pickled.
            keep_torch_compile: return the compiled module if the user compiled it.
        """
        return self._weights.unwrap(model, keep_fp32_wrapper, keep_torch_compile)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor] | None:  # noqa: ARG002
        """Collect the unpartitioned weights and buffers in CPU memory; collective.

        Tensors have the dtype of the model's parameters, not of the fp32 master weights. For a model with PEFT adapters
        only the adapters and other trained parameters are collected.

        Args:
            model: a prepared model, or any other.
            unwrap: has no effect: names are always the names in the user's module.

        Returns:
            The state dict on the main process, None on all others, with every strategy.
        """
        return self._weights.collect(model)

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
        """Write the weights to a folder of safetensors files; collective: each process writes its part.

        The folder of a transformers model can be loaded with `from_pretrained`. For a model with PEFT adapters only the
        adapters are written, in PEFT's layout. The file `resolved_config.json` records how the model was trained: every
        value of the configuration and its origin. If an error occurs, the previous model in the folder is kept.

        Args:
            model: a prepared model, or any other.
            save_directory: the folder; it is created if it does not exist.
            max_shard_size: the largest size of one file, e.g. `5GB`.
            safe_serialization: must be True.
            trainable_only: write only parameters with `requires_grad`, without configuration files. Load them into the
                base model by `load_weights(model, folder, strict=False)`.
            dtype: the dtype of floating-point parameters in the files: `fp32`, `bf16`, `fp16` or a `torch.dtype`. They
                are converted from the fp32 master weights: `fp32` writes these exactly. None keeps each parameter's
                training dtype. Buffers keep their dtype.

        Raises:
            LoopError: `safe_serialization` is False; the model is partitioned but not prepared; or the model has no
                tensor to write.
            CheckpointError: a process cannot write, or `dtype` needs fp32 master weights that are not accessible.
            ConfigError: `max_shard_size` or `dtype` is invalid.
        """
        self._weights.save_model(
            model, save_directory, max_shard_size, safe_serialization, trainable_only=trainable_only, dtype=dtype
        )

    def whole_weights(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Return a context manager to read and write weights of models as in plain PyTorch; collective.

        Use it to average weights (EMA, mean teacher), to clip them, or to call `load_state_dict` between steps. Under
        ZeRO the optimizer continues from the written values. At stage 3 the parameters are unpartitioned inside, on
        every process, and rank 0's values are kept; every process must write the same values. Before `prepare`, use it
        at stage 3 for a model that was built partitioned: to group its parameters by `p.ndim`, to count or initialize
        them.

            with accelerator.whole_weights(model):
                ema.update(model.parameters())

        Args:
            *models: prepared models, or partitioned models that are not prepared. Other models stay as they are.

        Raises:
            LoopError: a model's weights are offloaded to NVMe.
        """
        return self._weights.whole_weights(*models)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Save an object with `torch.save` on the main process only.

        Args:
            obj: the object to save.
            f: a path, or a file opened for writing.
            safe_serialization: write `obj`, a dict of tensors, as safetensors to the path `f`; a tensor with several
                names is written once.

        Raises:
            LoopError: a tensor is partitioned: no process has all of it.
        """
        self._weights.save_object(obj, f, safe_serialization)

    def init_model(
        self, weights: str | os.PathLike[str] | None = None, *, strict: bool = True
    ) -> AbstractContextManager[list[WeightsReport]]:
        """Return a context manager to construct a model; at ZeRO stage 3 no process ever holds all of the model.

        Without `weights` the model gets the same initial values as outside. With `weights` its parameters are
        constructed on the meta device, without memory, and are read from the files when the context ends. At ZeRO stage
        3 each process then reads its partition; otherwise each process reads the complete model directly to its device.
        Buffers are always computed.

            with accelerator.init_model(weights="folder"):
                model = MyModel(config)

        transformers' `from_pretrained` and `from_config` do not need this context after `Accelerator()`, unless the
        configuration has `zero3_init_flag: false`. `from_config` then draws other random values than outside.

        Args:
            weights: a folder of safetensors (from transformers, `save_model` or `save_state`), or one file. Every
                outermost module constructed inside reads its weights from there.
            strict: see `load_weights`. If False, parameters that are not in the files are initialized as in a new
                model.

        Yields:
            A list; when the context has ended, it holds one report for each model.

        Raises:
            CheckpointError: see `load_weights`; an invalid folder is an error before anything is constructed.
            LoopError: no model was constructed inside.
        """
        return self._weights.init_model(weights, strict=strict)

    def load_weights(self, model: nn.Module, weights: str | os.PathLike[str], *, strict: bool = True) -> WeightsReport:
        """Read weights from safetensors into a model; collective: each process reads only the bytes that it keeps.

        Values are converted to the dtype of the model. The fp32 master weights of a prepared model are read from the
        files too, not rounded to 16 bits first; its optimizer states do not change.

        Args:
            model: prepared or not; its parameters may be on the meta device.
            weights: a folder of safetensors (from transformers, `save_model` or `save_state`), or one file. Its names
                must be the model's; for transformers' older names and other layouts use `from_pretrained`.
            strict: every tensor of the model and of the files must have a counterpart. If False, other tensors are left
                unchanged, or initialized if they are on the meta device, which is logged.

        Returns:
            A report: which tensors were loaded, missing, unexpected, or had another shape.

        Raises:
            CheckpointError: on every process: names or shapes do not match (all are listed, and nothing was written),
                or a file is missing or damaged.
            MachineError: CPU memory does not hold the model for each process of a machine.
        """
        return self._weights.load(model, Path(weights), strict=strict)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,  # noqa: ARG002 - nothing is written with pickle
        *,
        total_limit: int | None = None,
        max_shard_size: int | str = "10GB",
        asynchronous: bool = False,
        **options: Any,
    ) -> Path:
        """Write a checkpoint that training can resume from with any strategy and number of processes; collective.

        The checkpoint holds models, optimizers, learning-rate schedulers, loss scale, counters, the random states of
        all processes, the positions of the loaders, and registered objects; see docs/checkpoints.md. The folder appears
        only when the checkpoint is complete.

        With `asynchronous` the call returns once everything that a script may change is copied to CPU memory. The
        optimizer states and fp32 master weights are copied during the next forward and backward, before the next step.
        Then a thread writes the copy while training continues. The next `save_state` or `load_state`, `wait_for_save`,
        `end_training` and the exit of the process wait until the checkpoint is complete. Each process keeps the memory
        of its copy for the next checkpoint, until `free_memory` or `end_training`.

        Args:
            output_dir: the folder. With `ProjectConfiguration(automatic_checkpoint_naming=True)` it is ignored, and the
                folder is `project_dir/checkpoints/checkpoint_<iteration>`, with the next number that is not in use.
            safe_serialization: has no effect: files are always safetensors and JSON.
            total_limit: the number of checkpoints to keep. When the new one is complete, the oldest checkpoints of this
                run whose names differ only in the number are removed. None takes `ProjectConfiguration(total_limit=…)`
                if names are automatic. A launch, its restarts, and launches that resume from its newest checkpoint are
                one run.
            max_shard_size: the largest size of a weight file, e.g. `5GB`.
            asynchronous: write the checkpoint in the background. If the copy does not fit into a machine's memory, this
                is logged, and the checkpoint is written before the call returns.
            **options: refused; Accelerate passes them to DeepSpeed.

        Returns:
            The folder of the checkpoint; with `asynchronous` it does not exist yet.

        Raises:
            CheckpointError: on every process: the checkpoint cannot be written, and older ones are unchanged; or the
                previous one failed in the background, and this one is not started.
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
        """Wait until the checkpoint that `save_state(asynchronous=True)` started is complete; collective.

        Returns:
            The folder of the checkpoint; None if none was being written.

        Raises:
            CheckpointError: on every process: the checkpoint could not be written; older ones are unchanged.
        """
        return self._checkpoints.wait()

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,  # noqa: ARG002 - torch.load is not used
        *,
        strict: bool = True,
        weights_only: bool = False,
        verify: bool = True,
        map_location: str | None = None,
        **options: Any,
    ) -> LoadReport:
        """Load a checkpoint of `save_state`, written with any strategy and number of processes; collective.

        Loaders repeat the sample order of the interrupted epoch from its first batch; use
        `skip_first_batches(loader, report.batches[i])` to continue after the last batch that was trained. With
        `DataLoaderConfiguration(use_stateful_dataloader=True)` they continue there automatically.

        Args:
            input_dir: a checkpoint, or a folder of `checkpoint_<number>` folders: the newest complete one is loaded,
                preferably of this run. None takes `project_dir/checkpoints` if names are automatic.
            load_kwargs: accepted for compatibility, and ignored.
            strict: raise an error if only the model or only the checkpoint has a tensor.
            weights_only: load only the weights of the models.
            verify: compare the files with their checksums while they are read. In a folder of several checkpoints, a
                damaged one is skipped, which is logged, and the one before it is loaded.
            map_location: `cpu` or `on_device`, accepted for compatibility: tensors are always read to the device that
                uses them.
            **options: refused; Accelerate passes them to DeepSpeed.

        Returns:
            A report of what was restored and what was not.

        Raises:
            CheckpointError: the checkpoint does not match the prepared objects; or a save in the background failed, and
                nothing was loaded.
            DamagedError: a CheckpointError: the checkpoint, or every checkpoint of the folder, is damaged. The error
                names the newest complete one before it. The model may hold parts of the damaged one.
        """
        return self._checkpoints.load(
            input_dir,
            strict=strict,
            weights_only=weights_only,
            verify=verify,
            map_location=map_location,
            options=options,
        )

    def resume(self, folder: str | os.PathLike[str] | None = None, *, verify: bool = True) -> LoadReport | None:
        """Load the newest complete checkpoint, if one exists; collective, after `prepare`.

        After a restart by the launcher (`--max_restarts`, or smaller micro-batches after memory ran out) only the run's
        own checkpoints are considered. At its first start a run resumes from the newest checkpoint of any run in the
        folder, which is logged; with `auto_resume: false` in the configuration it starts from the beginning. With
        `--auto_resume` (`auto_resume: true`) it is an error to train without having called this.

        Loaders automatically continue inside the interrupted epoch:

            resumed = accelerator.resume()
            for epoch in range(resumed.epochs[0] if resumed else 0, epochs):
                for batch in loader:
                    ...

        Args:
            folder: a folder of `checkpoint_<number>` folders, or one checkpoint; None takes `project_dir/checkpoints`
                if names are automatic.
            verify: as for `load_state`.

        Returns:
            A report of what was restored; None if training starts from the beginning.

        Raises:
            CheckpointError: all checkpoints are damaged, or do not match the prepared objects.
        """
        return self._checkpoints.resume(folder, verify=verify)

    def stop_requested(self) -> bool:
        """Check whether any process has received SIGTERM, which job schedulers send; collective, the same on all.

        After the first call SIGTERM no longer ends this process: the loop must call this after each step, save and
        exit. The launcher waits `--grace_period` seconds for that, and returns 143.

            if accelerator.stop_requested():
                accelerator.save_state()
                break

        Raises:
            LoopError: the first call is not in the main thread: Python installs signal handlers only there.
        """
        return self._run.stop_requested()

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Add objects to checkpoints, by their `state_dict()` and `load_state_dict()`.

        The state of the main process is saved, and loaded on every process.

        Raises:
            ValueError: an object does not have both methods.
        """
        self._checkpoints.register(objects)

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Call `hook(models, weights, output_dir)` on every process before `save_state` writes.

        Args:
            hook: receives the user's modules of all prepared models; their unpartitioned weights (on the main process;
                empty dicts on the others); and the folder of the checkpoint. The hook may write files into that folder.
                `save_state` does not write weights that the hook removes from the list on the main process. A module's
                `state_dict()` and `save_pretrained` work in the hook at stage 3 too.
        """
        return add_hook(self._checkpoints.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Call `hook(models, input_dir)` on every process before `load_state` reads.

        Args:
            hook: receives the user's modules of all prepared models and the folder of the checkpoint. `load_state` does
                not load the weights of a model that the hook removes from the list. At stage 3, `load_state_dict()` of
                a module works in the hook if every process calls it; `state_dict()` has names and shapes only.
        """
        return add_hook(self._checkpoints.load_hooks, hook)

    # ---- experiment trackers; they act on the main process only ------------------------------------------------------

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The trackers that `init_trackers` has started."""
        return self._run.trackers.started

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Start the trackers of `log_with`.

        Args:
            project_name: the name of the project or run, as each tracker interprets it.
            config: the hyperparameters to store.
            init_kwargs: further arguments for each tracker, e.g. `{"wandb": {"mode": "offline"}}`. Arguments for a
                tracker that is not in `log_with` have no effect, which is logged.
        """
        self._run.trackers.start(self.log_with, project_name, config, init_kwargs or {})

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return the started tracker of that name.

        Without started trackers, and on other processes, return a tracker that does nothing.

        Args:
            name: e.g. `wandb`.
            unwrap: return the library's own object, e.g. wandb's run, instead of the tracker.

        Raises:
            LoopError: other trackers are started, but none of that name; or end_training() has closed the trackers.
        """
        return self._run.trackers.find(name, unwrap=unwrap)

    def log(
        self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Write measurements to every started tracker.

        Args:
            values: numbers, strings or dicts of numbers by name; tensors and arrays are converted to numbers.
            step: the step of these values.
            log_kwargs: further arguments for the `log` method of each tracker.

        Raises:
            LoopError: end_training() has closed the trackers.
        """
        self._run.trackers.log(values, step, log_kwargs or {})

    def metrics(self, units: int = 0, unit: str = "tokens") -> dict[str, float]:
        """Return measurements of the last optimizer step, for `log`; not collective.

        Args:
            units: how many units, e.g. tokens, this process has computed since the last call; 0 for no throughput.
            unit: the name of the unit.

        Returns:
            `lr` (of the first parameter group); `grad_norm` (before clipping) if it was computed; under fp16
            `loss_scale`, and `skipped_steps` since the last applied step; `tokens_per_second` of all processes,
            estimated from this one; `memory_available_gb` of the GPU or the machine. With several models, the names of
            the second and later models end with the model's index, as in `lr_1`.
        """
        return self._prepared.measure() | self._run.meter.read(units, unit)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def end_training(self) -> None:
        """Close trackers, models and the process group; collective. Also runs at the exit of the process.

        If closing one of them fails, the rest is still closed, and the exception is raised at the end.

        Raises:
            CheckpointError: a save in the background failed; everything was closed nevertheless.
        """
        self._run.end()

    # ---- Accelerate's private attributes, which scripts and libraries read -------------------------------------------

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
        return self  # a copy of an object that holds an Accelerator belongs to the same run

    def __reduce__(self) -> tuple[Callable[[], Accelerator], tuple[()]]:
        return newest_accelerator, ()  # `datasets` pickles the functions that it runs, to hash them
