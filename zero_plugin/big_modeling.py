"""Models that no device holds, by Accelerate's name for the module."""

from __future__ import annotations

from zero_plugin.big_models.dispatch import cpu_offload, cpu_offload_with_hook, disk_offload, dispatch_model
from zero_plugin.big_models.hooks import attach_layerwise_casting_hooks
from zero_plugin.big_models.load import load_checkpoint_and_dispatch
from zero_plugin.tensors.empty import init_empty_weights, init_on_device

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
