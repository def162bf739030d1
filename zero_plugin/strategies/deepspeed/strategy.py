"""`DeepSpeedStrategy`: builds DeepSpeed engines from a resolved configuration."""

from __future__ import annotations

import logging
import os
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, Final, Literal

import deepspeed
import torch
from deepspeed import zero
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.runtime import bf16_optimizer, torch_autocast
from deepspeed.utils import groups, set_z3_leaf_module
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_plugin.config.choices import DDPCommunicationHookType, DistributedType
from zero_plugin.config.document import Document
from zero_plugin.config.handlers import Handlers
from zero_plugin.config.installed import warn_of_transformers
from zero_plugin.config.keys import LaunchSettings
from zero_plugin.config.placeholders import DummyOptim
from zero_plugin.config.resolve.facts import Resolved
from zero_plugin.config.resolve.resolve import BUCKET_CEILING, expected_precision
from zero_plugin.config.tree import AUTO, Tree
from zero_plugin.distributed.processes import Processes, is_registered
from zero_plugin.errors import ConfigError, LoopError, MachineError, Problem
from zero_plugin.machine.op_builds import build_folder, needed_ops, refuse_stale_build_locks
from zero_plugin.plan.run_plan import probe_machine
from zero_plugin.strategies.base import Saving, Session, SessionRequest, Strategy
from zero_plugin.strategies.deepspeed import partitioned_models
from zero_plugin.strategies.deepspeed.builds import omit_shared_memory_op, showing_refusals, watch_builders
from zero_plugin.strategies.deepspeed.guards import GUARDS
from zero_plugin.strategies.deepspeed.guards.group_shapes import refuse_groups_by_empty_shape
from zero_plugin.strategies.deepspeed.guards.rank_allocation import refuse_rank_allocation
from zero_plugin.strategies.deepspeed.lifetime import clear_caches, weaken_module_stack
from zero_plugin.strategies.deepspeed.nvme import give_own_swap_folders, remove_abandoned
from zero_plugin.strategies.deepspeed.optimizers import engine_optimizer, refuse_unfit, share_groups
from zero_plugin.strategies.deepspeed.patches import replaced
from zero_plugin.strategies.deepspeed.session import EngineSession
from zero_plugin.strategies.deepspeed.states import partitions_to_fill
from zero_plugin.strategies.events import subscribe
from zero_plugin.strategies.experts import find_expert_layers, reach_every_expert
from zero_plugin.strategies.optimizer_only import take_step_hooks
from zero_plugin.strategies.optimizer_states import take_states
from zero_plugin.strategies.precision import LossScale, compute_in
from zero_plugin.strategies.torch_session import TorchSession
from zero_plugin.tensors.modules import Fragment, allocate_unpartitioned, as_pretrained
from zero_plugin.tensors.wrappers import compile_in_place

_log = logging.getLogger(__name__)


_DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class DeepSpeedStrategy(Strategy):
    """ZeRO 0-3 on GPUs over NCCL, and on CPUs over gloo.

    Args:
        document: the configuration as it was given.
        settings: its launch section.
        processes: this process and its peers.
    """

    name = "deepspeed"
    distributed_type = DistributedType.DEEPSPEED
    reads_engine_keys = True

    def __init__(self, document: Document, settings: LaunchSettings, processes: Processes) -> None:
        self._document = document
        self._settings = settings
        self._processes = processes
        self._chosen_stage: int | None = None  # for the model prepared last, where the configuration leaves it open

    def accept(self, handlers: Handlers) -> list[str]:
        """See `Strategy.accept`: there is no DDP and no autocast, and the loss scale is only doubled and halved."""
        super().accept(handlers)
        problems, lines = [], []
        if (ddp := handlers.ddp) is not None:
            hooks = {str(ddp.comm_hook), str(ddp.comm_wrapper)} - {str(DDPCommunicationHookType.NO)}
            if hooks:
                where = "DistributedDataParallelKwargs(comm_hook=…)"
                message = f"{', '.join(sorted(hooks))}, but DeepSpeed has no DDP"
                problems.append(Problem(where, "", message, "Write communication_data_type: fp16 or bf16."))
            elif given := ", ".join(ddp.to_kwargs()):
                lines.append(f"DistributedDataParallelKwargs({given}): has no effect: ZeRO does not use DDP")
        if (scaler := handlers.scaler) is not None:
            for name, fixed in (("growth_factor", 2.0), ("backoff_factor", 0.5)):
                if scaler.enabled and getattr(scaler, name) != fixed:
                    where = f"GradScalerKwargs({name}={getattr(scaler, name)})"
                    problems.append(Problem(where, "", f"DeepSpeed only supports {fixed}", "Leave it out."))
        if handlers.autocast is not None and handlers.autocast.to_kwargs():
            lines.append(
                "AutocastKwargs: has no effect, since ZeRO does not use autocast: the weights are in the 16-bit dtype"
            )
        if problems:
            raise ConfigError(problems)
        loads = self.partitions_parameters and self._settings.zero3_init_flag is not False
        if loads and "transformers" in sys.modules and (warning := warn_of_transformers()):
            lines.append(warning)
        return lines

    def zero_stage(self, resolved: Resolved) -> Literal[0, 1, 2, 3] | None:
        stage: Literal[0, 1, 2, 3] = resolved.zero_stage  # type: ignore[assignment]  # it has no other
        return stage

    def remove_leftover_files(self, resolved: Resolved, processes: Processes) -> None:
        remove_abandoned(resolved.deepspeed_config(), processes)

    def savings(self, resolved: Resolved) -> tuple[Saving, ...]:
        stage, next_stage = resolved.zero_stage, max(2, resolved.zero_stage + 1)
        devices = {what: resolved.offload_device(what) for what in ("optimizer", "param")}
        options = []
        bucket = resolved.tree.value("zero_optimization", "reduce_bucket_size") or 0
        if stage and bucket > BUCKET_CEILING:
            text = f"reduce_bucket_size: {BUCKET_CEILING} (it is {bucket:g}), which costs no speed"
            options.append(Saving(text, {"reduce_bucket": BUCKET_CEILING}))
        if stage < 3:
            options.append(Saving(f"zero_stage: {next_stage} (it is {stage})", {"stage": next_stage}))
        if devices["optimizer"] == "none":
            options.append(Saving("offload_optimizer_device: cpu", {"offload_optimizer": "cpu"}))
        if devices["param"] == "none":
            needs = ", which needs zero_stage: 3" if stage < 3 else ""
            options.append(Saving(f"offload_param_device: cpu{needs}", {"stage": 3, "offload_param": "cpu"}))
        return tuple(options)

    def build_session(self, request: SessionRequest, processes: Processes) -> Session:
        """See `Strategy.build_session`.

        Raises:
            ConfigError: the optimizer cannot run on flat partitions; see `engine_optimizer`.
            LoopError: the optimizer has a state that cannot be partitioned, or ZeRO cannot train the model.
            MachineError: a killed op build left its lock, a compiler is missing, or DeepSpeed was imported for another
                device before.
        """
        resolved = request.resolved
        self._chosen_stage = resolved.zero_stage
        _refuse_ended(request)
        refuse_unfit(request)
        if resolved.zero_stage == 3:
            refuse_groups_by_empty_shape(request.optimizer, request.model)
        is_partitioned = resolved.zero_stage == 3 and any(True for _ in request.model.parameters())
        if request.optimizer is None and not is_partitioned:
            return self._build_plain_session(request, processes)
        if not request.is_placed:
            _log.info(f"device_placement=False has no effect: an engine moves its {type(request.model).__name__}")
        given = request.optimizer if isinstance(request.optimizer, Optimizer) else None
        described = resolved.optimizer if request.optimizer is not None else None
        kind = type(given).__name__ if given is not None else described.type if described is not None else ""
        _set_up_deepspeed(processes, resolved.tree, kind.lower())
        states = None if given is None else take_states(given, request.model, joins_groups=resolved.zero_stage > 0)
        # `engine_optimizer` implements these two keys; the engine would refuse classes of this package.
        obeyed = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
        config = resolved.deepspeed_config() | obeyed
        swap_folders = give_own_swap_folders(config, processes)
        _cast_parameters(request.model, resolved.precision)
        if resolved.zero_stage == 3:
            self._partition(request, config)
        ties = self._tie_experts(request) if self._processes.world_size > 1 else []
        optimizer = None
        parameters: Any = None
        if request.optimizer is not None:
            with showing_refusals():
                optimizer = engine_optimizer(request, processes.device)
            if optimizer is None:
                assert isinstance(request.optimizer, DummyOptim)
                parameters = request.optimizer.params
            else:
                config.pop("optimizer", None)
        if given is not None and states is not None:
            if optimizer is given and resolved.zero_stage == 0 and resolved.precision == "no":
                states = None  # it steps the parameters themselves, so its states stay valid
            else:
                for p in [key for key in given.state if isinstance(key, Tensor)]:
                    del given.state[p]  # else each process would keep unpartitioned ones
        if given is not None and optimizer is not None:
            given.state = optimizer.state  # what the script does with its own one counts, if a kernel replaces that
        groups = [] if given is None else [list(group["params"]) for group in given.param_groups]
        engine = self._initialize(request, optimizer, parameters, config)
        hooks = take_step_hooks(given)  # it steps partitions, or another optimizer replaces it
        scale = LossScale(resolved.tree.section("fp16").nested())
        session = EngineSession(engine, scale=scale, swap_folders=swap_folders, given=given)
        session.step_hooks = hooks
        if given is not None and (resolved.zero_stage > 0 or resolved.precision != "no"):
            session.at_end.append(partial(_release_optimizer, given, groups))
        session.undo += ties
        refuse_rank_allocation(engine.module, session.patches)
        subscribe(session, GUARDS[resolved.zero_stage], self.checks)
        if states is not None:
            try:
                session.load_given_states(states)
            except BaseException:
                session.close()
                raise
        return session

    def _initialize(self, request: SessionRequest, optimizer: Any, parameters: Any, config: dict[str, Any]) -> Any:
        """Build the engine; DeepSpeed builds an optimizer of `parameters` if `optimizer` is None."""
        resolved = request.resolved
        # An engine with `torch_autocast` sets it for the process. One of a later run without it would reduce gradients
        # in that dtype, or step by a scaler that no loss was scaled by.
        torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
        with (
            showing_refusals(),
            warnings.catch_warnings(),
            self._processes.counted_by_gpu(),
            partitioned_models.broadcasting_any_shape(),
            _quiet_construction(),
        ):
            warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
            engine, *_ = deepspeed.initialize(
                model=request.model,
                optimizer=optimizer,
                model_parameters=parameters,
                config=config,
                dist_init_required=False,
            )
        share_groups(engine)
        if resolved.tree.has_section("activation_checkpointing"):
            # An engine does this for a PipelineModule only, but any model may use deepspeed.checkpointing.
            deepspeed.checkpointing.configure(None, deepspeed_config=config)
        if resolved.zero_stage == 0 and resolved.precision != "no":
            _undo_first_step(engine)
        if self.handlers.compiles:
            compile_in_place(engine.module, self.handlers.compiler)
        return engine

    @contextmanager
    def init_model(self) -> Iterator[None]:
        if not self.partitions_parameters:
            yield
            return
        with partitioned_models.partition_when_built(self._build_config()):
            yield

    def _build_config(self) -> partitioned_models.BuildConfig:
        """Set up DeepSpeed, for models that are constructed before `prepare`, and return how to partition them."""
        _set_up_deepspeed(self._processes, self._document.deepspeed)
        return partitioned_models.BuildConfig(self._document, self._processes)

    def allocate(self, module: nn.Module, device: torch.device) -> None:
        """See `Strategy.allocate`: at stage 3 this process's partitions; below it, in the dtype of the training."""
        if not any(p.is_meta for p in module.parameters()):
            super().allocate(module, device)
        elif not self.partitions_parameters:
            machine = probe_machine("cuda" if device.type == "cuda" else "cpu", self._processes.world_size)
            allocate_unpartitioned(module, device, _DTYPES[expected_precision(self._document, machine)])
        else:
            partitioned_models.allocate_partitions(module, self._build_config())

    def fragments_to_fill(self, module: nn.Module, names: Collection[str]) -> Iterator[Fragment]:
        if not any(hasattr(p, "ds_id") for p in module.parameters()):
            return super().fragments_to_fill(module, names)
        return partitions_to_fill(module, names)

    def gathered_tensors(self, tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
        return partitioned_models.gathered_parameters(tensors, modifier_rank=0, forward_of=None)

    def whole_weights(self, module: nn.Module) -> AbstractContextManager[None]:
        return partitioned_models.whole_weights(module)

    def forget_dropped(self) -> None:
        """See `Strategy.forget_dropped`: DeepSpeed's global lists and caches of stage 3."""
        weaken_module_stack()
        clear_caches()

    def destroy_process_group(self) -> None:
        """See `Strategy.destroy_process_group`: DeepSpeed caches groups for its next engine."""
        super().destroy_process_group()
        groups._release_process_group_references()

    def load_pretrained(self, partitioned: bool | None = None) -> AbstractContextManager[None]:
        """See `Strategy.load_pretrained`; has an effect only if transformers is already imported."""
        if partitioned is None:
            partitioned = self._settings.zero3_init_flag is not False
        partitions = partitioned and self.partitions_parameters and "transformers" in sys.modules
        integration = sys.modules.get("transformers.integrations.deepspeed")
        if not partitions and (integration is None or integration._hf_deepspeed_config_weak_ref is None):
            return nullcontext()
        build = self._build_config()
        return partitioned_models.building_pretrained(build if partitions else None)

    @property
    def partitions_parameters(self) -> bool:
        """See `Strategy.partitions_parameters`; if the stage is `auto`, that chosen for the last model."""
        stage = self._document.deepspeed.value("zero_optimization", "stage")
        return (self._chosen_stage if stage is AUTO else stage) == 3

    def _build_plain_session(self, request: SessionRequest, processes: Processes) -> Session:
        """A session without an engine, for a model without an optimizer: below stage 3 nothing of it is partitioned."""
        resolved = request.resolved
        module = _cast_parameters(request.model, resolved.precision)
        if request.is_placed:
            module.to(processes.device)
        if (dtype := resolved.tree.value("data_types", "buffer_dtype")) in ("bf16", "fp16"):
            for buffer in module.buffers():
                if buffer.is_floating_point():
                    buffer.data = buffer.data.to(_DTYPES[dtype])
        undo = compute_in(module, _DTYPES[resolved.precision])
        if self.handlers.compiles:
            compile_in_place(module, self.handlers.compiler)
        session = TorchSession(module, module, None, precision="no")
        session.undo += undo
        return session

    def _partition(self, request: SessionRequest, config: dict[str, Any]) -> None:
        """Partition parameters that are not partitioned yet, and adapt the methods of transformers models."""
        model = request.model
        if not any(hasattr(p, "ds_id") for p in model.parameters()):
            if as_pretrained(model) is not None and self._settings.zero3_init_flag is not False:
                _log.info(
                    f"the {type(model).__name__} was built unpartitioned in every process, then partitioned; import "
                    "transformers before Accelerator(), and build the model after it with from_pretrained() or inside "
                    "`with accelerator.init_model():`, and no process ever holds all of it"
                )
            # Converted here, with the dtype of the config: `initialize` passes a dtype that zero.Init ignores if the
            # device does not support fp16, so that fp32 weights would be swapped to NVMe in bf16. If some parameters
            # are already partitioned, `initialize` partitions the others in the same way.
            partitioned_models.forget_second_copies()
            with self._processes.counted_by_gpu():
                zero.Init(module=model, config_dict_or_path=config)
        partitioned_models.adapt_pretrained_methods(model, self._processes)

    def _tie_experts(self, request: SessionRequest) -> list[Callable[[], None]]:
        """Make all processes gather and reduce the same parameters of mixture-of-experts layers.

        Returns:
            What takes this back.
        """
        names = self._settings.deepspeed_moe_layer_cls_names or ()
        layers = list(find_expert_layers(request.model, names))
        at_stage3 = request.resolved.zero_stage == 3
        undo = []
        for layer in layers:
            undo.append(reach_every_expert(layer, with_gradients=not at_stage3))
            set_z3_leaf_module(layer, at_stage3)
        for kind, count in Counter(type(layer).__name__ for layer in layers).items():
            how = "gathered and reduced with all its experts" if at_stage3 else "reduced with all its experts"
            _log.info(f"{count} × {kind}: each is {how}, since processes may choose different experts")
        return undo


_RELEASED: Final[weakref.WeakSet[Optimizer]] = weakref.WeakSet()


def _release_optimizer(optimizer: Optimizer, groups: list[list[Tensor]]) -> None:
    """Give an optimizer its own parameters back, whose partitions it has stepped. Its states ended with the engine."""
    for group, parameters in zip(optimizer.param_groups, groups, strict=False):
        group["params"] = parameters
    _RELEASED.add(optimizer)


def _refuse_ended(request: SessionRequest) -> None:
    """Refuse an optimizer, or a partitioned model, whose earlier training under ZeRO has ended.

    Raises:
        LoopError: the states of the optimizer, or the process group that has the partitions, are gone.
    """
    if isinstance(request.optimizer, Optimizer) and request.optimizer in _RELEASED:
        raise LoopError(
            f"prepare() got the {type(request.optimizer).__name__} of a training that has ended: its states were "
            "partitioned, and were released by free_memory() or end_training().\nBuild a new optimizer."
        )
    for p in request.model.parameters():
        group = getattr(p, "ds_process_group", None)
        if group is not None and not is_registered(group):
            raise LoopError(
                f"prepare() got a {type(request.model).__name__} that ZeRO stage 3 has partitioned over the processes "
                "of a training that has ended.\nBuild the model again, with the weights that were saved before "
                "end_training(). To train on in the same run, call free_memory() instead of end_training()."
            )


def _cast_parameters(model: nn.Module, precision: str) -> nn.Module:
    """Cast the floating-point parameters to the dtype of training; buffers keep theirs, as with DeepSpeed."""
    for p in model.parameters():
        if p.is_floating_point():
            p.data = p.data.to(_DTYPES[precision])
    return model


def _set_up_deepspeed(processes: Processes, training: Tree, optimizer: str | None = None) -> None:
    """Set up DeepSpeed for this process's device and process group, with fewer log messages.

    Args:
        processes: this process and its peers.
        training: the DeepSpeed configuration.
        optimizer: the class or `type` of the engine's optimizer, in lower case; None if no engine is built yet.

    Raises:
        MachineError: a killed build of an op that the run loads left its lock, or DeepSpeed was imported for another
            device before.
    """
    kind = processes.device.type
    ops = needed_ops(training, optimizer, on_gpu=kind == "cuda")
    refuse_stale_build_locks(ops, build_folder(os.environ, torch.version.cuda))
    watch_builders(OpBuilder)
    found = get_accelerator().device_name()
    if found != kind:
        raise MachineError(
            f"DeepSpeed is set up for {found}, but this run uses {kind}.\n"
            f"Set DS_ACCELERATOR={kind} before the script starts (zero-plugin launch does), or do not import deepspeed "
            "before Accelerator()."
        )
    if "ZERO_PLUGIN_DEBUG" not in os.environ:
        deepspeed.utils.logger.setLevel(logging.WARNING)
        deepspeed.utils.logger.addFilter(_is_not_of_untested)
    # torch has renamed collectives that DeepSpeed 0.19 calls by their old names at every step.
    warnings.filterwarnings("ignore", message=".*_tensor` is deprecated", category=FutureWarning)
    compatible = deepspeed.ops.__compatible_ops__
    own = dict(compatible)
    omit_shared_memory_op(compatible)
    try:
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False, dist_init_required=False)
    finally:
        compatible.update(own)
    partitioned_models.partition_any_shape()


def _is_not_of_untested(record: logging.LogRecord) -> bool:
    """False for DeepSpeed's warning of an untested optimizer, which `engine_optimizer` has tested."""
    return "untested optimizer" not in record.getMessage()


def _quiet_construction() -> AbstractContextManager[None]:
    """Inside, BF16_Optimizer does not print its memory use, which it does at any log level."""
    if "ZERO_PLUGIN_DEBUG" in os.environ:
        return nullcontext()
    return replaced(bf16_optimizer, "see_memory_usage", lambda *_, **__: None)


def _undo_first_step(engine: Any) -> None:
    """Undo the optimizer step, with zero gradients, that the 16-bit wrappers of stage 0 take in their constructor.

    It advances Adam's bias correction and applies weight decay to the master weights.
    """
    wrapper = engine.optimizer
    wrapper.optimizer.state.clear()
    if hasattr(wrapper, "fp32_groups_flat"):
        both = wrapper.fp32_groups_flat, wrapper.fp16_groups_flat
    else:
        both = chain(*wrapper.fp32_groups), chain(*wrapper.fp16_groups)
    with torch.no_grad():
        for master, weight in zip(*both, strict=True):
            master.copy_(weight)
