"""The trackers under Accelerate's name for their module."""

from __future__ import annotations

from zero_plugin.trackers.base import GeneralTracker, on_main_process
from zero_plugin.trackers.choose import get_available_trackers
from zero_plugin.trackers.jsonl import JsonlTracker
from zero_plugin.trackers.mlflow import MLflowTracker
from zero_plugin.trackers.tensorboard import TensorBoardTracker
from zero_plugin.trackers.wandb import WandBTracker

__all__ = [
    "GeneralTracker",
    "JsonlTracker",
    "MLflowTracker",
    "TensorBoardTracker",
    "WandBTracker",
    "get_available_trackers",
    "on_main_process",
]
