"""Train a PyTorch model that does not fit: DeepSpeed ZeRO from one config, or plain DDP with the same script."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero_plugin.accelerator import Accelerator
    from zero_plugin.big_models.dispatch import cpu_offload, cpu_offload_with_hook, disk_offload, dispatch_model
    from zero_plugin.big_models.load import load_checkpoint_and_dispatch, load_checkpoint_in_model
    from zero_plugin.big_models.placement import infer_auto_device_map
    from zero_plugin.config.choices import DDPCommunicationHookType, DistributedType
    from zero_plugin.config.deepspeed_plugin import DeepSpeedPlugin
    from zero_plugin.config.placeholders import DummyOptim, DummyScheduler
    from zero_plugin.config.plugins import (
        AutocastKwargs,
        DataLoaderConfiguration,
        DistributedDataParallelKwargs,
        GradientAccumulationPlugin,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        ProfileKwargs,
        ProjectConfiguration,
    )
    from zero_plugin.data.loader import skip_first_batches
    from zero_plugin.distributed.seeding import set_seed, synchronize_rng_states
    from zero_plugin.launch.flags import write_basic_config
    from zero_plugin.launch.notebook import debug_launcher, notebook_launcher
    from zero_plugin.loop.progress import Progress
    from zero_plugin.loop.state import PartialState
    from zero_plugin.tensors.empty import init_empty_weights, init_on_device
    from zero_plugin.utils.memory import find_executable_batch_size

__version__ = "0.1.0"
__all__ = [
    "Accelerator",
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DummyOptim",
    "DummyScheduler",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "PartialState",
    "ProfileKwargs",
    "Progress",
    "ProjectConfiguration",
    "cpu_offload",
    "cpu_offload_with_hook",
    "debug_launcher",
    "disk_offload",
    "dispatch_model",
    "find_executable_batch_size",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "notebook_launcher",
    "set_seed",
    "skip_first_batches",
    "synchronize_rng_states",
    "write_basic_config",
]

# Names load on first use, so that `import zero_plugin` and the command line do not import torch.
_HOME = {
    "Accelerator": "zero_plugin.accelerator",
    "AutocastKwargs": "zero_plugin.config.plugins",
    "DDPCommunicationHookType": "zero_plugin.config.choices",
    "DataLoaderConfiguration": "zero_plugin.config.plugins",
    "DeepSpeedPlugin": "zero_plugin.config.deepspeed_plugin",
    "DistributedDataParallelKwargs": "zero_plugin.config.plugins",
    "DistributedType": "zero_plugin.config.choices",
    "DummyOptim": "zero_plugin.config.placeholders",
    "DummyScheduler": "zero_plugin.config.placeholders",
    "GradScalerKwargs": "zero_plugin.config.plugins",
    "GradientAccumulationPlugin": "zero_plugin.config.plugins",
    "InitProcessGroupKwargs": "zero_plugin.config.plugins",
    "PartialState": "zero_plugin.loop.state",
    "ProfileKwargs": "zero_plugin.config.plugins",
    "Progress": "zero_plugin.loop.progress",
    "ProjectConfiguration": "zero_plugin.config.plugins",
    "cpu_offload": "zero_plugin.big_models.dispatch",
    "cpu_offload_with_hook": "zero_plugin.big_models.dispatch",
    "debug_launcher": "zero_plugin.launch.notebook",
    "disk_offload": "zero_plugin.big_models.dispatch",
    "dispatch_model": "zero_plugin.big_models.dispatch",
    "find_executable_batch_size": "zero_plugin.utils.memory",
    "infer_auto_device_map": "zero_plugin.big_models.placement",
    "init_empty_weights": "zero_plugin.tensors.empty",
    "init_on_device": "zero_plugin.tensors.empty",
    "load_checkpoint_and_dispatch": "zero_plugin.big_models.load",
    "load_checkpoint_in_model": "zero_plugin.big_models.load",
    "notebook_launcher": "zero_plugin.launch.notebook",
    "set_seed": "zero_plugin.distributed.seeding",
    "skip_first_batches": "zero_plugin.data.loader",
    "synchronize_rng_states": "zero_plugin.distributed.seeding",
    "write_basic_config": "zero_plugin.launch.flags",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        from zero_plugin.utils.left_out import stand_in

        return stand_in(__name__, name)
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
