"""The prepared optimizer under Accelerate's name for its module."""

from zero_plugin.loop.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
