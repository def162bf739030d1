"""`DeepSpeedStrategy`: build DeepSpeed engines from a resolved configuration."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch
from deepspeed.utils import groups
from torch import Tensor, nn

from zero_plugin.config.choices import DDPCommunicationHookType, DistributedType
from zero_plugin.config.document import Document
from zero_plugin.config.handlers import Handlers
from zero_plugin.config.installed import warn_of_transformers
from zero_plugin.config.keys import LaunchSettings
from zero_plugin.config.resolve.facts import Resolved
from zero_plugin.config.resolve.resolve import BUCKET_CEILING, expected_precision
from zero_plugin.config.tree import AUTO
from zero_plugin.distributed.processes import Processes
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.plan.run_plan import probe_machine
from zero_plugin.strategies.base import Saving, Session, SessionRequest, Strategy
from zero_plugin.strategies.deepspeed import partitioned_models, pretrained
from zero_plugin.strategies.deepspeed.engine import (
    DTYPES,
    EngineBuild,
    cast_parameters,
    refuse_ended,
    set_up_deepspeed,
)
from zero_plugin.strategies.deepspeed.guards import GUARDS
from zero_plugin.strategies.deepspeed.guards.group_shapes import refuse_groups_by_empty_shape
from zero_plugin.strategies.deepspeed.guards.rank_allocation import refuse_rank_allocation
from zero_plugin.strategies.deepspeed.lifetime import clear_caches, weaken_module_stack
from zero_plugin.strategies.deepspeed.nvme import remove_abandoned
from zero_plugin.strategies.deepspeed.optimizers import refuse_unfit
from zero_plugin.strategies.deepspeed.states import partitions_to_fill
from zero_plugin.strategies.events import subscribe
from zero_plugin.strategies.precision import compute_in
from zero_plugin.strategies.torch_session import TorchSession
from zero_plugin.tensors.modules import Fragment, allocate_unpartitioned
from zero_plugin.tensors.wrappers import compile_in_place

_log = logging.getLogger(__name__)


class DeepSpeedStrategy(Strategy):
    """The strategy of ZeRO 0-3, on GPUs over NCCL and on CPUs over gloo.

    Args:
        document: the user's configuration.
        settings: the launch section of the configuration.
        processes: this process and its peers.
    """

    name = "deepspeed"
    distributed_type = DistributedType.DEEPSPEED
    reads_engine_keys = True

    def __init__(self, document: Document, settings: LaunchSettings, processes: Processes) -> None:
        self._document = document
        self._settings = settings
        self._processes = processes
        self._chosen_stage: int | None = None  # the last prepared model's stage, for `stage: auto`

    def accept(self, handlers: Handlers) -> list[str]:
        """Set the arguments. ZeRO has no DDP and no autocast, and only doubles or halves the loss scale."""
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
        """Build the session, as in `Strategy.build_session`.

        Raises:
            ConfigError: the optimizer cannot run on flat partitions; see `engine_optimizer`.
            LoopError: the optimizer has a state that cannot be partitioned, or ZeRO cannot train the model.
            MachineError: a killed op build left its lock, a compiler is missing, or DeepSpeed was imported for another
                device before.
        """
        stage = request.resolved.zero_stage
        self._chosen_stage = stage
        refuse_ended(request)
        refuse_unfit(request)
        if stage == 3:
            refuse_groups_by_empty_shape(request.optimizer, request.model)
        is_partitioned = stage == 3 and any(True for _ in request.model.parameters())
        if request.optimizer is None and not is_partitioned:
            return self._build_plain_session(request, processes)
        if not request.is_placed:
            _log.info(f"device_placement=False has no effect: an engine moves its {type(request.model).__name__}")
        build = EngineBuild(request, processes, self._settings, self.handlers)
        build.set_up()
        build.shape_model()
        build.choose_optimizer()
        session = build.open_session(build.initialize())
        refuse_rank_allocation(session.module, session.patches)
        subscribe(session, GUARDS[stage], self.checks)
        build.load_given_states(session)
        return session

    @contextmanager
    def init_model(self) -> Iterator[None]:
        if not self.partitions_parameters:
            yield
            return
        with pretrained.partition_when_built(self._build_config()):
            yield

    def _build_config(self) -> partitioned_models.BuildConfig:
        """Set up DeepSpeed for models that are constructed before `prepare`. Return how to partition them."""
        set_up_deepspeed(self._processes, self._document.deepspeed)
        return partitioned_models.BuildConfig(self._document, self._processes)

    def allocate(self, module: nn.Module, device: torch.device) -> None:
        """Allocate this process's partitions at stage 3; otherwise, tensors in the dtype of training."""
        if not any(p.is_meta for p in module.parameters()):
            super().allocate(module, device)
        elif not self.partitions_parameters:
            machine = probe_machine("cuda" if device.type == "cuda" else "cpu", self._processes.world_size)
            allocate_unpartitioned(module, device, DTYPES[expected_precision(self._document, machine)])
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
        """Release garbage-collected models from DeepSpeed's global lists and caches of stage 3."""
        weaken_module_stack()
        clear_caches()

    def destroy_process_group(self) -> None:
        """Destroy the process group, and forget the groups that DeepSpeed caches for its next engine."""
        super().destroy_process_group()
        groups._release_process_group_references()

    def load_pretrained(self, partitioned: bool | None = None) -> AbstractContextManager[None]:
        """Return the context of `Strategy.load_pretrained`; no effect unless transformers is already imported."""
        if partitioned is None:
            partitioned = self._settings.zero3_init_flag is not False
        partitions = partitioned and self.partitions_parameters and "transformers" in sys.modules
        integration = sys.modules.get("transformers.integrations.deepspeed")
        if not partitions and (integration is None or integration._hf_deepspeed_config_weak_ref is None):
            return nullcontext()
        build = self._build_config()
        return pretrained.building_pretrained(build if partitions else None)

    @property
    def partitions_parameters(self) -> bool:
        """Whether parameters are partitioned; with `stage: auto`, by the stage chosen for the last model."""
        stage = self._document.deepspeed.value("zero_optimization", "stage")
        return (self._chosen_stage if stage is AUTO else stage) == 3

    def _build_plain_session(self, request: SessionRequest, processes: Processes) -> Session:
        """Build a session without an engine, for a model without an optimizer that is not partitioned."""
        resolved = request.resolved
        module = cast_parameters(request.model, resolved.precision)
        if request.is_placed:
            module.to(processes.device)
        if (dtype := resolved.tree.value("data_types", "buffer_dtype")) in ("bf16", "fp16"):
            for buffer in module.buffers():
                if buffer.is_floating_point():
                    buffer.data = buffer.data.to(DTYPES[dtype])
        undo = compute_in(module, DTYPES[resolved.precision])
        if self.handlers.compiles:
            compile_in_place(module, self.handlers.compiler)
        session = TorchSession(module, module, None, precision="no")
        session.undo += undo
        return session
