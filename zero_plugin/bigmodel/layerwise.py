"""Keep the weights of layers in a small type, and compute in a larger one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import nn

from zero_plugin.bigmodel.hooks import ModelHook, add_hook_to_module

__all__ = ["LayerwiseCastingHook", "attach_layerwise_casting_hooks"]

# Layers that do nothing but compute with their own weights.
_LAYERS: Final = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    nn.Linear,
)


class LayerwiseCastingHook(ModelHook):
    """The module's weights have one type in its forward and another between forwards.

    Args:
        storage_dtype: between forwards.
        compute_dtype: in the forward.
        non_blocking: do not wait for copies.
    """

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool = False) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        """To the type of storage."""
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """To the type of the forward."""
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Back to the type of storage."""
        self.interrupted(module)
        return output

    def interrupted(self, module: nn.Module) -> None:
        """Back to the type of storage."""
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | Iterable[str] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Put a `LayerwiseCastingHook` on every linear and convolution layer.

    Values lose what the storage type cannot hold; a loss is seen at once, and does not grow.

    Args:
        module: changed in place.
        storage_dtype: for example `torch.float8_e4m3fn`.
        compute_dtype: for example `torch.bfloat16`.
        skip_modules_pattern: regular expressions; modules where one is found in the name stay as they are, with all
            inside.
        skip_modules_classes: classes of modules that stay as they are, with all inside.
        non_blocking: do not wait for copies.
    """
    patterns = [skip_modules_pattern] if isinstance(skip_modules_pattern, str) else list(skip_modules_pattern or ())
    remaining = [("", module)]
    while remaining:
        name, part = remaining.pop()
        if isinstance(part, skip_modules_classes or ()) or any(re.search(pattern, name) for pattern in patterns):
            continue
        if isinstance(part, _LAYERS):
            add_hook_to_module(part, LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking), append=True)
        else:
            remaining.extend((f"{name}.{key}".lstrip("."), child) for key, child in part.named_children())
