"""The trackers under Accelerate's name for their module."""

from __future__ import annotations

from zero_plugin.trackers.choose import get_available_trackers
from zero_plugin.trackers.trackers import (
    GeneralTracker,
    JsonlTracker,
    MLflowTracker,
    TensorBoardTracker,
    WandBTracker,
    on_main_process,
)

__all__ = [
    "GeneralTracker",
    "JsonlTracker",
    "MLflowTracker",
    "TensorBoardTracker",
    "WandBTracker",
    "get_available_trackers",
    "on_main_process",
]
