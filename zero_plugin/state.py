"""The states that scripts read, under Accelerate's name for their module."""

from zero_plugin.config.choices import DistributedType as DistributedType
from zero_plugin.data.active import GradientState as GradientState
from zero_plugin.loop.state import AcceleratorState as AcceleratorState
from zero_plugin.loop.state import PartialState as PartialState
from zero_plugin.loop.state import is_initialized as is_initialized
