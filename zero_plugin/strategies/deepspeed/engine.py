"""Build a DeepSpeed engine and its session in five steps. The order of the steps matters."""

from __future__ import annotations

import logging
import os
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, Final

import deepspeed
import torch
from deepspeed import zero
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.runtime import bf16_optimizer, torch_autocast
from deepspeed.utils import set_z3_leaf_module
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_plugin.config.handlers import Handlers
from zero_plugin.config.keys import LaunchSettings
from zero_plugin.config.placeholders import DummyOptim
from zero_plugin.config.tree import Tree
from zero_plugin.distributed.processes import Processes, is_registered
from zero_plugin.errors import LoopError, MachineError
from zero_plugin.machine.op_builds import build_folder, needed_ops, refuse_stale_build_locks
from zero_plugin.strategies.base import SessionRequest
from zero_plugin.strategies.deepspeed import partitioned_models, pretrained, shapes
from zero_plugin.strategies.deepspeed.builds import omit_shared_memory_op, showing_refusals, watch_builders
from zero_plugin.strategies.deepspeed.nvme import give_own_swap_folders
from zero_plugin.strategies.deepspeed.optimizers import engine_optimizer, share_groups
from zero_plugin.strategies.deepspeed.patches import replaced
from zero_plugin.strategies.deepspeed.session import EngineSession
from zero_plugin.strategies.experts import find_expert_layers, reach_every_expert
from zero_plugin.strategies.optimizer_only import take_step_hooks
from zero_plugin.strategies.optimizer_states import GivenStates, take_states
from zero_plugin.strategies.precision import LossScale
from zero_plugin.tensors.modules import as_pretrained
from zero_plugin.tensors.wrappers import compile_in_place

_log = logging.getLogger(__name__)

DTYPES: Final = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class EngineBuild:
    """The build of one engine and its session. Call its methods in the order in which they are defined.

    Args:
        request: the model, its optimizer and the resolved configuration.
        processes: this process and its peers.
        settings: the launch section of the configuration.
        handlers: the script's keyword handlers.
    """

    def __init__(
        self, request: SessionRequest, processes: Processes, settings: LaunchSettings, handlers: Handlers
    ) -> None:
        self._request = request
        self._resolved = request.resolved
        self._processes = processes
        self._settings = settings
        self._handlers = handlers
        self._given = request.optimizer if isinstance(request.optimizer, Optimizer) else None
        # `choose_optimizer` already obeys these two keys. The engine would refuse optimizers of this package.
        obeyed = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
        self._config: dict[str, Any] = self._resolved.deepspeed_config() | obeyed
        self._swap_folders: tuple[Any, ...] = ()
        self._states: GivenStates | None = None
        self._undo: list[Callable[[], None]] = []
        self._optimizer: Any = None
        self._parameters: Any = None  # parameters of an optimizer that DeepSpeed builds
        self._groups: list[list[Tensor]] = []  # the parameters of the script's groups, restored when the engine ends

    def set_up(self) -> None:
        """Set up DeepSpeed, and copy the states of the script's optimizer while its parameters are unpartitioned."""
        given, resolved = self._given, self._resolved
        described = resolved.optimizer if self._request.optimizer is not None else None
        kind = type(given).__name__ if given is not None else described.type if described is not None else ""
        set_up_deepspeed(self._processes, resolved.tree, kind.lower())
        if given is not None:
            self._states = take_states(given, self._request.model, joins_groups=resolved.zero_stage > 0)
        self._swap_folders = give_own_swap_folders(self._config, self._processes)

    def shape_model(self) -> None:
        """Cast the parameters, partition them at stage 3, and tie experts. Cast first: partitions keep the dtype."""
        cast_parameters(self._request.model, self._resolved.precision)
        if self._resolved.zero_stage == 3:
            self._partition()
        if self._processes.world_size > 1:
            self._tie_experts()

    def choose_optimizer(self) -> None:
        """Choose the optimizer that steps the shaped parameters. Release the states of a replaced optimizer."""
        given, resolved = self._given, self._resolved
        if self._request.optimizer is not None:
            with showing_refusals():
                self._optimizer = engine_optimizer(self._request, self._processes.device)
            if self._optimizer is None:
                assert isinstance(self._request.optimizer, DummyOptim)
                self._parameters = self._request.optimizer.params
            else:
                self._config.pop("optimizer", None)
        if given is None:
            return
        if self._optimizer is given and resolved.zero_stage == 0 and resolved.precision == "no":
            self._states = None  # this optimizer steps the parameters themselves, so its states stay valid
        elif self._states is not None:
            for p in [key for key in given.state if isinstance(key, Tensor)]:
                del given.state[p]  # otherwise each process would keep unpartitioned states
        if self._optimizer is not None:
            given.state = self._optimizer.state  # the script reads the states from its own optimizer, even if replaced

    def initialize(self) -> Any:
        """Build the engine. DeepSpeed builds the optimizer of a `DummyOptim` for which this package has no class."""
        resolved = self._resolved
        # An engine with `torch_autocast` sets this flag for the whole process. A later engine without it would reduce
        # gradients in the wrong dtype, or step with a scaler that has scaled no loss.
        torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
        self._groups = [] if self._given is None else [list(group["params"]) for group in self._given.param_groups]
        with (
            showing_refusals(),
            warnings.catch_warnings(),
            self._processes.counted_by_gpu(),
            shapes.broadcasting_any_shape(),
            _quiet_construction(),
        ):
            warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
            engine, *_ = deepspeed.initialize(
                model=self._request.model,
                optimizer=self._optimizer,
                model_parameters=self._parameters,
                config=self._config,
                dist_init_required=False,
            )
        share_groups(engine)
        if resolved.tree.has_section("activation_checkpointing"):
            # An engine does this only for a PipelineModule, but any model may use deepspeed.checkpointing.
            deepspeed.checkpointing.configure(None, deepspeed_config=self._config)
        if resolved.zero_stage == 0 and resolved.precision != "no":
            _undo_first_step(engine)
        if self._handlers.compiles:
            compile_in_place(engine.module, self._handlers.compiler)
        return engine

    def open_session(self, engine: Any) -> EngineSession:
        """Build the session that calls the engine."""
        given, resolved = self._given, self._resolved
        # Take the hooks after `initialize`: its wrappers step partitions, or another optimizer replaces `given`.
        hooks = take_step_hooks(given)
        scale = LossScale(resolved.tree.section("fp16").nested())
        session = EngineSession(engine, scale=scale, swap_folders=self._swap_folders, given=given)
        session.step_hooks = hooks
        if given is not None and (resolved.zero_stage > 0 or resolved.precision != "no"):
            session.at_end.append(partial(_release_optimizer, given, self._groups))
        session.undo += self._undo
        return session

    def load_given_states(self, session: EngineSession) -> None:
        """Load the states of the script's optimizer into the engine's; close the session on failure. Collective."""
        if self._states is None:
            return
        try:
            session.load_given_states(self._states)
        except BaseException:
            session.close()
            raise

    def _partition(self) -> None:
        """Partition parameters that are not partitioned yet, and adapt the methods of transformers models."""
        model = self._request.model
        if not any(hasattr(p, "ds_id") for p in model.parameters()):
            if as_pretrained(model) is not None and self._settings.zero3_init_flag is not False:
                _log.info(
                    f"the {type(model).__name__} was built unpartitioned in every process, then partitioned. To avoid "
                    "that, import transformers before Accelerator(), and build the model after it with "
                    "from_pretrained() or inside `with accelerator.init_model():`"
                )
            # Partition here, with the dtype of the config: if the device does not support fp16, `initialize` passes a
            # dtype that zero.Init ignores, and fp32 weights would be swapped to NVMe in bf16. If some parameters are
            # already partitioned, `initialize` partitions the others in the same way.
            partitioned_models.forget_second_copies()
            with self._processes.counted_by_gpu():
                zero.Init(module=model, config_dict_or_path=self._config)
        pretrained.adapt_pretrained_methods(model, self._processes)

    def _tie_experts(self) -> None:
        """Make all processes gather and reduce the same parameters of mixture-of-experts layers."""
        names = self._settings.deepspeed_moe_layer_cls_names or ()
        layers = list(find_expert_layers(self._request.model, names))
        at_stage3 = self._resolved.zero_stage == 3
        for layer in layers:
            self._undo.append(reach_every_expert(layer, with_gradients=not at_stage3))
            set_z3_leaf_module(layer, at_stage3)
        for kind, count in Counter(type(layer).__name__ for layer in layers).items():
            how = "gathered and reduced with all its experts" if at_stage3 else "reduced with all its experts"
            _log.info(f"{count} × {kind}: each is {how}, since processes may choose different experts")


_RELEASED: Final[weakref.WeakSet[Optimizer]] = weakref.WeakSet()


def _release_optimizer(optimizer: Optimizer, groups: list[list[Tensor]]) -> None:
    """Restore an optimizer's own parameters after it has stepped partitions. Its states ended with the engine."""
    for group, parameters in zip(optimizer.param_groups, groups, strict=False):
        group["params"] = parameters
    _RELEASED.add(optimizer)


def refuse_ended(request: SessionRequest) -> None:
    """Refuse an optimizer, or a partitioned model, whose earlier training under ZeRO has ended.

    Raises:
        LoopError: the optimizer's states, or the process group of the partitions, are gone.
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


def cast_parameters(model: nn.Module, precision: str) -> nn.Module:
    """Cast the floating-point parameters to the dtype of training; buffers keep theirs, as with DeepSpeed."""
    for p in model.parameters():
        if p.is_floating_point():
            p.data = p.data.to(DTYPES[precision])
    return model


def set_up_deepspeed(processes: Processes, training: Tree, optimizer: str | None = None) -> None:
    """Set up DeepSpeed for this process's device and process group, with fewer log messages.

    Args:
        processes: this process and its peers.
        training: the DeepSpeed configuration.
        optimizer: the class or `type` of the engine's optimizer, in lower case; None if no engine is built yet.

    Raises:
        MachineError: a killed build of an op that the run loads left its lock; or DeepSpeed was imported for another
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
    # torch has renamed collectives, and DeepSpeed 0.19 calls their old names at every step.
    warnings.filterwarnings("ignore", message=".*_tensor` is deprecated", category=FutureWarning)
    compatible = deepspeed.ops.__compatible_ops__
    own = dict(compatible)
    omit_shared_memory_op(compatible)
    try:
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False, dist_init_required=False)
    finally:
        compatible.update(own)
    shapes.partition_any_shape()


def _is_not_of_untested(record: logging.LogRecord) -> bool:
    """Return False for DeepSpeed's warning of an untested optimizer, which `engine_optimizer` has tested."""
    return "untested optimizer" not in record.getMessage()


def _quiet_construction() -> AbstractContextManager[None]:
    """Silence BF16_Optimizer inside this context: it prints its memory use at any log level."""
    if "ZERO_PLUGIN_DEBUG" in os.environ:
        return nullcontext()
    return replaced(bf16_optimizer, "see_memory_usage", lambda *_, **__: None)


def _undo_first_step(engine: Any) -> None:
    """Undo the step with zero gradients that the 16-bit wrappers of stage 0 take in their constructor.

    This step advances Adam's bias correction and applies weight decay to the master weights.
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
