"""Hooks around a module's forward, by Accelerate's name for the module."""

from __future__ import annotations

from zero_plugin.bigmodel.align import AlignDevicesHook
from zero_plugin.bigmodel.hooks import (
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from zero_plugin.bigmodel.layerwise import LayerwiseCastingHook
from zero_plugin.bigmodel.offload import attach_align_device_hook
from zero_plugin.bigmodel.whole import CpuOffload, UserCpuOffloadHook

__all__ = [
    "AlignDevicesHook",
    "CpuOffload",
    "LayerwiseCastingHook",
    "ModelHook",
    "SequentialHook",
    "UserCpuOffloadHook",
    "add_hook_to_module",
    "attach_align_device_hook",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
]
