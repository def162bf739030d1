"""The trackers under Accelerate's name for their module."""

from zero_plugin.trackers.trackers import GeneralTracker as GeneralTracker
from zero_plugin.trackers.trackers import JsonlTracker as JsonlTracker
from zero_plugin.trackers.trackers import MLflowTracker as MLflowTracker
from zero_plugin.trackers.trackers import TensorBoardTracker as TensorBoardTracker
from zero_plugin.trackers.trackers import WandBTracker as WandBTracker
from zero_plugin.trackers.trackers import get_available_trackers as get_available_trackers
from zero_plugin.trackers.trackers import on_main_process as on_main_process
