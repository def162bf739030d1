"""What goes in and out of a model whose weights are 16 bits wide."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zero_plugin.nested import map_leaves, to_fp32

__all__ = ["compute_in"]


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """From now on floating inputs come to `model` in `dtype` and floating outputs leave in fp32; integers never change.

    So the loss is computed as without mixed precision.
    """
    if dtype == torch.float32:
        return

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    def cast_inputs(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return map_leaves(cast, args), map_leaves(cast, kwargs)

    model.register_forward_pre_hook(cast_inputs, with_kwargs=True)
    model.register_forward_hook(lambda _module, _inputs, outputs: map_leaves(to_fp32, outputs))
