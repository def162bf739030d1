"""The launchers under Accelerate's name for their module."""

from __future__ import annotations

from zero_plugin.launch.notebook import debug_launcher as debug_launcher
from zero_plugin.launch.notebook import notebook_launcher as notebook_launcher
