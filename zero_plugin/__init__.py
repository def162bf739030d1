"""Train a PyTorch model that does not fit: DeepSpeed ZeRO from one config, or plain DDP with the same script."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero_plugin.accelerator import Accelerator
    from zero_plugin.bigmodel.dispatch import dispatch_model
    from zero_plugin.bigmodel.empty import init_empty_weights, init_on_device
    from zero_plugin.bigmodel.load import load_checkpoint_and_dispatch, load_checkpoint_in_model
    from zero_plugin.bigmodel.offload import cpu_offload, disk_offload
    from zero_plugin.bigmodel.placement import infer_auto_device_map
    from zero_plugin.bigmodel.whole import cpu_offload_with_hook
    from zero_plugin.choices import DDPCommunicationHookType
    from zero_plugin.data.skip import skip_first_batches
    from zero_plugin.deepspeed_plugin import DeepSpeedPlugin
    from zero_plugin.distributed_type import DistributedType
    from zero_plugin.launch.basic_config import write_basic_config
    from zero_plugin.launch.notebook import debug_launcher, notebook_launcher
    from zero_plugin.placeholders import DummyOptim, DummyScheduler
    from zero_plugin.plugins import (
        AutocastKwargs,
        DataLoaderConfiguration,
        DistributedDataParallelKwargs,
        GradientAccumulationPlugin,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        ProfileKwargs,
        ProjectConfiguration,
    )
    from zero_plugin.progress import Progress
    from zero_plugin.seeding import set_seed, synchronize_rng_states
    from zero_plugin.state import PartialState
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
    "AutocastKwargs": "zero_plugin.plugins",
    "DDPCommunicationHookType": "zero_plugin.choices",
    "DataLoaderConfiguration": "zero_plugin.plugins",
    "DeepSpeedPlugin": "zero_plugin.deepspeed_plugin",
    "DistributedDataParallelKwargs": "zero_plugin.plugins",
    "DistributedType": "zero_plugin.distributed_type",
    "DummyOptim": "zero_plugin.placeholders",
    "DummyScheduler": "zero_plugin.placeholders",
    "GradScalerKwargs": "zero_plugin.plugins",
    "GradientAccumulationPlugin": "zero_plugin.plugins",
    "InitProcessGroupKwargs": "zero_plugin.plugins",
    "PartialState": "zero_plugin.state",
    "ProfileKwargs": "zero_plugin.plugins",
    "Progress": "zero_plugin.progress",
    "ProjectConfiguration": "zero_plugin.plugins",
    "cpu_offload": "zero_plugin.bigmodel.offload",
    "cpu_offload_with_hook": "zero_plugin.bigmodel.whole",
    "debug_launcher": "zero_plugin.launch.notebook",
    "disk_offload": "zero_plugin.bigmodel.offload",
    "dispatch_model": "zero_plugin.bigmodel.dispatch",
    "find_executable_batch_size": "zero_plugin.utils.memory",
    "infer_auto_device_map": "zero_plugin.bigmodel.placement",
    "init_empty_weights": "zero_plugin.bigmodel.empty",
    "init_on_device": "zero_plugin.bigmodel.empty",
    "load_checkpoint_and_dispatch": "zero_plugin.bigmodel.load",
    "load_checkpoint_in_model": "zero_plugin.bigmodel.load",
    "notebook_launcher": "zero_plugin.launch.notebook",
    "set_seed": "zero_plugin.seeding",
    "skip_first_batches": "zero_plugin.data.skip",
    "synchronize_rng_states": "zero_plugin.seeding",
    "write_basic_config": "zero_plugin.launch.basic_config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        from zero_plugin.utils.left_out import stand_in

        return stand_in(__name__, name)
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
