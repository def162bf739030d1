"""The prepared learning-rate scheduler under Accelerate's name for its module."""

from zero_plugin.loop.scheduler import AcceleratedScheduler as AcceleratedScheduler
