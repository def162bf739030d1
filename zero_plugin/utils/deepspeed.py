"""Placeholders and the DeepSpeed configuration, as scripts import them from `accelerate.utils.deepspeed`."""

from __future__ import annotations

from typing import Any

from zero_plugin.config.deepspeed_plugin import HfDeepSpeedConfig
from zero_plugin.config.placeholders import DummyOptim, DummyScheduler

__all__ = ["DummyOptim", "DummyScheduler", "HfDeepSpeedConfig", "get_active_deepspeed_plugin"]


def get_active_deepspeed_plugin(state: Any) -> Any:
    """The `DeepSpeedPlugin` that is in use.

    Args:
        state: `AcceleratorState()`, or `accelerator.state`.

    Raises:
        ValueError: the run does not use DeepSpeed.
    """
    if (plugin := state.deepspeed_plugin) is None:
        raise ValueError("this run does not use DeepSpeed; give it a DeepSpeed configuration (zero-plugin config)")
    return plugin
