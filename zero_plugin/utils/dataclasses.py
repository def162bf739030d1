"""The records and enumerations that scripts import from `accelerate.utils.dataclasses`."""

from __future__ import annotations

from typing import Any

from zero_plugin.config.choices import BaseEnum as BaseEnum
from zero_plugin.config.choices import ComputeEnvironment as ComputeEnvironment
from zero_plugin.config.choices import DDPCommunicationHookType as DDPCommunicationHookType
from zero_plugin.config.choices import DistributedType as DistributedType
from zero_plugin.config.choices import DynamoBackend as DynamoBackend
from zero_plugin.config.choices import EnumWithContains as EnumWithContains
from zero_plugin.config.choices import LoggerType as LoggerType
from zero_plugin.config.choices import PrecisionType as PrecisionType
from zero_plugin.config.choices import RNGType as RNGType
from zero_plugin.config.handlers import AutocastKwargs as AutocastKwargs
from zero_plugin.config.handlers import DataLoaderConfiguration as DataLoaderConfiguration
from zero_plugin.config.handlers import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from zero_plugin.config.handlers import GradientAccumulationPlugin as GradientAccumulationPlugin
from zero_plugin.config.handlers import GradScalerKwargs as GradScalerKwargs
from zero_plugin.config.handlers import InitProcessGroupKwargs as InitProcessGroupKwargs
from zero_plugin.config.handlers import KwargsHandler as KwargsHandler
from zero_plugin.config.handlers import ProfileKwargs as ProfileKwargs
from zero_plugin.config.handlers import ProjectConfiguration as ProjectConfiguration
from zero_plugin.config.handlers import TorchDynamoPlugin as TorchDynamoPlugin
from zero_plugin.config.parallelism import DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig
from zero_plugin.config.parallelism import ParallelismConfig as ParallelismConfig
from zero_plugin.config.plugins import DeepSpeedPlugin as DeepSpeedPlugin
from zero_plugin.tensors.nested import TensorInformation as TensorInformation
from zero_plugin.utils.lazy import stand_in


def __getattr__(name: str) -> Any:
    return stand_in(__name__, name)
