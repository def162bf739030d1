"""The prepared optimizer under Accelerate's name for its module."""

from __future__ import annotations

from zero_plugin.loop.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
