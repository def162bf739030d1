"""The launchers under Accelerate's name for their module."""

from __future__ import annotations

from zero_plugin.launch.notebook import debug_launcher, notebook_launcher

__all__ = ["debug_launcher", "notebook_launcher"]
