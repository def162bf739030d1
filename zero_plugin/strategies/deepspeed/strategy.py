"""Builds DeepSpeed engines from a resolved configuration."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import torch

from zero_plugin.errors import MachineError
from zero_plugin.placeholders import DummyOptim
from zero_plugin.strategies.base import Session, SessionRequest, Strategy
from zero_plugin.strategies.deepspeed.build_lock import refuse_stale_build_locks
from zero_plugin.strategies.deepspeed.swap_folders import give_own_swap_folders
from zero_plugin.strategies.processes import Processes
from zero_plugin.strategies.torch_session import TorchSession

__all__ = ["DeepSpeedStrategy"]

_DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class DeepSpeedStrategy(Strategy):
    """ZeRO 0-3 on GPUs over NCCL, and on CPUs over gloo."""

    name = "deepspeed"

    def __init__(self, processes: Processes) -> None:
        self._processes = processes

    def refuse(self) -> str | None:
        """See `Strategy.refuse`."""
        if self._processes.device.type not in ("cpu", "cuda"):
            return f"DeepSpeed does not run on {self._processes.device.type}"
        return None

    def build_session(self, request: SessionRequest, processes: Processes) -> Session:
        """See `Strategy.build_session`.

        Raises:
            ConfigError: the optimizer cannot run on flat partitions.
            MachineError: a killed op build left its lock, or DeepSpeed was imported for another device before.
        """
        resolved = request.resolved
        if request.optimizer is None and resolved.zero_stage < 3:
            # Nothing to shard without an optimizer below stage 3; DeepSpeed refuses such an engine.
            module = request.model.to(processes.device, _DTYPES[resolved.precision])
            return TorchSession(module, module, None, precision="no", clipping=None)
        deepspeed = _import_deepspeed(processes)
        refuse_stale_build_locks()

        from zero_plugin.strategies.deepspeed.optimizers import engine_optimizer
        from zero_plugin.strategies.deepspeed.session import EngineSession

        config = resolved.deepspeed_config()
        swap_folders = give_own_swap_folders(config, processes)
        if resolved.zero_stage == 3 and not any(hasattr(p, "ds_id") for p in request.model.parameters()):
            # Converted here, with the type read off the config: `initialize` passes a type along, which zero.Init
            # ignores where the device has no fp16, so that fp32 weights are swapped to NVMe in bf16.
            deepspeed.zero.Init(module=request.model.to(_DTYPES[resolved.precision]), config_dict_or_path=config)
        optimizer = None
        parameters: Any = None
        if request.optimizer is not None:
            optimizer = engine_optimizer(request, processes.device)
            if optimizer is None:
                assert isinstance(request.optimizer, DummyOptim)
                parameters = request.optimizer.params
            else:
                config.pop("optimizer", None)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
            engine, *_ = deepspeed.initialize(
                model=request.model,
                optimizer=optimizer,
                model_parameters=parameters,
                config=config,
                dist_init_required=False,
            )
        # torch renames collectives that DeepSpeed 0.19 calls by their old names at every step.
        warnings.filterwarnings("ignore", message=".*_tensor` is deprecated", category=FutureWarning)
        if resolved.zero_stage == 0 and resolved.precision != "no":
            _undo_first_step(engine)
        return EngineSession(engine, clipping=resolved.clipping, swap_folders=swap_folders)


def _import_deepspeed(processes: Processes) -> Any:
    """DeepSpeed, set up for this process' device, on the process group that exists, and quiet."""
    kind = processes.device.type
    os.environ.setdefault("DS_ACCELERATOR", kind)
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    found = get_accelerator().device_name()
    if found != kind:
        raise MachineError(
            f"DeepSpeed is set up for {found}, this run for {kind}.\n"
            f"Set DS_ACCELERATOR={kind} before the script starts (zero-plugin launch does), or do not import deepspeed "
            "before Accelerator()."
        )
    if "ZERO_PLUGIN_DEBUG" not in os.environ:
        deepspeed.utils.logger.setLevel(logging.WARNING)
        deepspeed.utils.logger.addFilter(_is_not_of_untested)
    # Building DeepSpeed's shared-memory collectives takes 20 s; only its inference kernels use them.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False, dist_init_required=False)
    return deepspeed


def _is_not_of_untested(record: logging.LogRecord) -> bool:
    """False for the warning that DeepSpeed has not tested an optimizer: `engine_optimizer` has just tried it."""
    return "untested optimizer" not in record.getMessage()


def _undo_first_step(engine: Any) -> None:
    """Take back the optimizer step, with zero gradients, that the 16-bit wrappers of stage 0 take when they are built.

    It advances Adam's bias correction and applies weight decay to the master weights.
    """
    wrapper = engine.optimizer
    wrapper.optimizer.state.clear()
    with torch.no_grad():
        if hasattr(wrapper, "fp32_groups_flat"):
            for master, weights in zip(wrapper.fp32_groups_flat, wrapper.fp16_groups_flat, strict=True):
                master.copy_(weights)
        else:
            for masters, group in zip(wrapper.fp32_groups, wrapper.fp16_groups, strict=True):
                for master, weight in zip(masters, group, strict=True):
                    master.copy_(weight)
