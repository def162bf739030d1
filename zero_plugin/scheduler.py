"""The prepared learning-rate scheduler under Accelerate's name for its module."""

from __future__ import annotations

from zero_plugin.loop.scheduler import AcceleratedScheduler as AcceleratedScheduler
