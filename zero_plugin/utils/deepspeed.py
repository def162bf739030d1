"""Placeholders and the DeepSpeed configuration, under the names of `accelerate.utils.deepspeed`."""

from __future__ import annotations

from typing import Any

from zero_plugin.config.placeholders import DummyOptim as DummyOptim
from zero_plugin.config.placeholders import DummyScheduler as DummyScheduler
from zero_plugin.config.plugins import HfDeepSpeedConfig as HfDeepSpeedConfig
from zero_plugin.utils.lazy import stand_in


def get_active_deepspeed_plugin(state: Any) -> Any:
    """Return the selected `DeepSpeedPlugin`.

    Args:
        state: `AcceleratorState()`, or `accelerator.state`.

    Raises:
        ValueError: the run does not use DeepSpeed.
    """
    if (plugin := state.deepspeed_plugin) is None:
        raise ValueError("this run does not use DeepSpeed; add a DeepSpeed configuration (zero-plugin config)")
    return plugin


def __getattr__(name: str) -> Any:
    return stand_in(__name__, name)
