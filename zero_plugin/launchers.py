"""The launchers under Accelerate's name for their module."""

from zero_plugin.launch.notebook import debug_launcher as debug_launcher
from zero_plugin.launch.notebook import notebook_launcher as notebook_launcher
