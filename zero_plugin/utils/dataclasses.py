"""The records and enumerations that scripts import from `accelerate.utils.dataclasses`."""

from __future__ import annotations

from typing import Any

from zero_plugin.config.choices import (
    BaseEnum,
    ComputeEnvironment,
    DDPCommunicationHookType,
    DistributedType,
    DynamoBackend,
    EnumWithContains,
    LoggerType,
    PrecisionType,
    RNGType,
)
from zero_plugin.config.deepspeed_plugin import DeepSpeedPlugin
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
)
from zero_plugin.tensors.trees import TensorInformation
from zero_plugin.utils.left_out import stand_in

__all__ = [
    "AutocastKwargs",
    "BaseEnum",
    "ComputeEnvironment",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DynamoBackend",
    "EnumWithContains",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "RNGType",
    "TensorInformation",
    "TorchDynamoPlugin",
]


def __getattr__(name: str) -> Any:
    return stand_in(__name__, name)
