"""Models that no device holds, by Accelerate's name for the module."""

from __future__ import annotations

from zero_plugin.bigmodel.dispatch import dispatch_model
from zero_plugin.bigmodel.empty import init_empty_weights, init_on_device
from zero_plugin.bigmodel.layerwise import attach_layerwise_casting_hooks
from zero_plugin.bigmodel.load import load_checkpoint_and_dispatch
from zero_plugin.bigmodel.offload import cpu_offload, disk_offload
from zero_plugin.bigmodel.whole import cpu_offload_with_hook

__all__ = [
    "attach_layerwise_casting_hooks",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
]
