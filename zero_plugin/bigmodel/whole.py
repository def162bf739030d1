"""Bring a whole model to the GPU when it runs, and back to host memory when the next one does."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zero_plugin.bigmodel.devices import find_place
from zero_plugin.bigmodel.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from zero_plugin.utils.memory import clear_device_cache
from zero_plugin.utils.trees import send_to_device

__all__ = ["CpuOffload", "UserCpuOffloadHook", "cpu_offload_with_hook"]


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: int | str | torch.device | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep a model in host memory until it runs; it stays on its device until the hook's `offload` is called.

    For a pipeline of models that do not fit together, of which each runs in a loop.

    Args:
        model: changed in place.
        execution_device: by default the GPU, and the CPU where there is none.
        prev_module_hook: of the model before it in the pipeline, which is offloaded when this one runs.

    Returns:
        The model, and its hook.
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


class CpuOffload(ModelHook):
    """Bring the module to a device for its forward, and leave it there.

    Args:
        execution_device: by default the GPU, and the CPU where there is none.
        prev_module_hook: offloaded before.
    """

    def __init__(
        self,
        execution_device: int | str | torch.device | None = None,
        prev_module_hook: UserCpuOffloadHook | None = None,
    ) -> None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self.execution_device = find_place(execution_device if execution_device is not None else accelerator or "cpu")
        self.prev_module_hook = prev_module_hook

    def init_hook(self, module: nn.Module) -> nn.Module:
        """To host memory."""
        return module.to("cpu")

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Send the previous model back, and bring this one with its arguments."""
        if self.prev_module_hook is not None and _device(self.prev_module_hook.model).type != "cpu":
            self.prev_module_hook.offload()
            clear_device_cache()
        if _device(module) != self.execution_device:
            module.to(self.execution_device)
        return send_to_device(args, self.execution_device), send_to_device(kwargs, self.execution_device)


class UserCpuOffloadHook:
    """What `cpu_offload_with_hook` returns.

    Args:
        model: the model.
        hook: the one on it.
    """

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Send the model back to host memory."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Take the hook off."""
        remove_hook_from_module(self.model)


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device
