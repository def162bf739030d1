"""The states that scripts read, under Accelerate's name for their module."""

from __future__ import annotations

from zero_plugin.config.choices import DistributedType
from zero_plugin.data.active import GradientState
from zero_plugin.loop.state import AcceleratorState, PartialState, is_initialized

__all__ = ["AcceleratorState", "DistributedType", "GradientState", "PartialState", "is_initialized"]
