"""Hooks around a module's forward, by Accelerate's name for the module."""

from __future__ import annotations

from zero_plugin.big_models.align import AlignDevicesHook
from zero_plugin.big_models.dispatch import CpuOffload, UserCpuOffloadHook, attach_align_device_hook
from zero_plugin.big_models.hooks import (
    LayerwiseCastingHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)

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
