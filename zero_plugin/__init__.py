"""Train a PyTorch model that does not fit: DeepSpeed ZeRO from one config, or plain DDP with the same script."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zero_plugin.utils.lazy import lazy_names

if TYPE_CHECKING:  # for editors and type checkers
    from zero_plugin.accelerator import Accelerator as Accelerator
    from zero_plugin.big_models.dispatch import cpu_offload as cpu_offload
    from zero_plugin.big_models.dispatch import cpu_offload_with_hook as cpu_offload_with_hook
    from zero_plugin.big_models.dispatch import disk_offload as disk_offload
    from zero_plugin.big_models.dispatch import dispatch_model as dispatch_model
    from zero_plugin.big_models.load import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
    from zero_plugin.big_models.load import load_checkpoint_in_model as load_checkpoint_in_model
    from zero_plugin.big_models.placement import infer_auto_device_map as infer_auto_device_map
    from zero_plugin.config.choices import DDPCommunicationHookType as DDPCommunicationHookType
    from zero_plugin.config.choices import DistributedType as DistributedType
    from zero_plugin.config.handlers import AutocastKwargs as AutocastKwargs
    from zero_plugin.config.handlers import DataLoaderConfiguration as DataLoaderConfiguration
    from zero_plugin.config.handlers import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from zero_plugin.config.handlers import GradientAccumulationPlugin as GradientAccumulationPlugin
    from zero_plugin.config.handlers import GradScalerKwargs as GradScalerKwargs
    from zero_plugin.config.handlers import InitProcessGroupKwargs as InitProcessGroupKwargs
    from zero_plugin.config.handlers import ProfileKwargs as ProfileKwargs
    from zero_plugin.config.handlers import ProjectConfiguration as ProjectConfiguration
    from zero_plugin.config.parallelism import ParallelismConfig as ParallelismConfig
    from zero_plugin.config.placeholders import DummyOptim as DummyOptim
    from zero_plugin.config.placeholders import DummyScheduler as DummyScheduler
    from zero_plugin.config.plugins import DeepSpeedPlugin as DeepSpeedPlugin
    from zero_plugin.data.loader import skip_first_batches as skip_first_batches
    from zero_plugin.distributed.seeding import set_seed as set_seed
    from zero_plugin.distributed.seeding import synchronize_rng_states as synchronize_rng_states
    from zero_plugin.launch.flags import write_basic_config as write_basic_config
    from zero_plugin.launch.notebook import debug_launcher as debug_launcher
    from zero_plugin.launch.notebook import notebook_launcher as notebook_launcher
    from zero_plugin.loop.progress import Progress as Progress
    from zero_plugin.loop.state import PartialState as PartialState
    from zero_plugin.tensors.dummy_forward import dummy_forward as dummy_forward
    from zero_plugin.tensors.empty import init_empty_weights as init_empty_weights
    from zero_plugin.tensors.empty import init_on_device as init_on_device
    from zero_plugin.utils.imports import is_rich_available as is_rich_available
    from zero_plugin.utils.memory import find_executable_batch_size as find_executable_batch_size

__version__ = "0.1.0"

_HOMES = {
    "zero_plugin.accelerator": "Accelerator",
    "zero_plugin.big_models.dispatch": "cpu_offload cpu_offload_with_hook disk_offload dispatch_model",
    "zero_plugin.big_models.load": "load_checkpoint_and_dispatch load_checkpoint_in_model",
    "zero_plugin.big_models.placement": "infer_auto_device_map",
    "zero_plugin.config.choices": "DDPCommunicationHookType DistributedType",
    "zero_plugin.config.parallelism": "ParallelismConfig",
    "zero_plugin.config.placeholders": "DummyOptim DummyScheduler",
    "zero_plugin.config.handlers": """AutocastKwargs DataLoaderConfiguration DistributedDataParallelKwargs
        GradScalerKwargs GradientAccumulationPlugin InitProcessGroupKwargs ProfileKwargs ProjectConfiguration""",
    "zero_plugin.config.plugins": "DeepSpeedPlugin",
    "zero_plugin.data.loader": "skip_first_batches",
    "zero_plugin.distributed.seeding": "set_seed synchronize_rng_states",
    "zero_plugin.launch.flags": "write_basic_config",
    "zero_plugin.launch.notebook": "debug_launcher notebook_launcher",
    "zero_plugin.loop.progress": "Progress",
    "zero_plugin.loop.state": "PartialState",
    "zero_plugin.tensors.dummy_forward": "dummy_forward",
    "zero_plugin.tensors.empty": "init_empty_weights init_on_device",
    "zero_plugin.utils.imports": "is_rich_available",
    "zero_plugin.utils.memory": "find_executable_batch_size",
}
_SUBMODULES = """accelerator big_modeling data_loader hooks launchers local_sgd logging optimizer parallelism_config
    scheduler state tracking"""
__getattr__, __dir__, __all__ = lazy_names(__name__, _HOMES, _SUBMODULES)
