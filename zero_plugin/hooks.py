"""Hooks around a module's forward, under Accelerate's name for their module."""

from zero_plugin.big_models.dispatch import CpuOffload as CpuOffload
from zero_plugin.big_models.dispatch import UserCpuOffloadHook as UserCpuOffloadHook
from zero_plugin.big_models.dispatch import attach_align_device_hook as attach_align_device_hook
from zero_plugin.big_models.module_hooks import AlignDevicesHook as AlignDevicesHook
from zero_plugin.big_models.module_hooks import LayerwiseCastingHook as LayerwiseCastingHook
from zero_plugin.big_models.module_hooks import ModelHook as ModelHook
from zero_plugin.big_models.module_hooks import SequentialHook as SequentialHook
from zero_plugin.big_models.module_hooks import add_hook_to_module as add_hook_to_module
from zero_plugin.big_models.module_hooks import remove_hook_from_module as remove_hook_from_module
from zero_plugin.big_models.module_hooks import remove_hook_from_submodules as remove_hook_from_submodules
