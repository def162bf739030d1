"""The trackers under Accelerate's name for their module."""

from typing import Any

from zero_plugin.trackers.trackers import LOGGER_TYPE_TO_CLASS as LOGGER_TYPE_TO_CLASS
from zero_plugin.trackers.trackers import GeneralTracker as GeneralTracker
from zero_plugin.trackers.trackers import JsonlTracker as JsonlTracker
from zero_plugin.trackers.trackers import MLflowTracker as MLflowTracker
from zero_plugin.trackers.trackers import TensorBoardTracker as TensorBoardTracker
from zero_plugin.trackers.trackers import WandBTracker as WandBTracker
from zero_plugin.trackers.trackers import get_available_trackers as get_available_trackers
from zero_plugin.trackers.trackers import on_main_process as on_main_process
from zero_plugin.trackers.trackers import register_tracker_class as register_tracker_class
from zero_plugin.utils.lazy import stand_in


def __getattr__(name: str) -> Any:
    return stand_in(__name__, name)
