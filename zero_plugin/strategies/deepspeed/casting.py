"""What goes in and out of a model whose weights are 16 bits wide."""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
from torch import Tensor, nn

from zero_plugin.errors import LoopError
from zero_plugin.nested import map_leaves, to_fp32
from zero_plugin.strategies.forwards import wrap_forward

__all__ = ["cast_buffers", "compute_in"]


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """From now on floating inputs come to `model` in `dtype` and floating outputs leave in fp32; integers never change.

    So the loss is computed as without mixed precision. Buffers keep their type, as DeepSpeed leaves them: where a layer
    cannot join it with its weights', the error says so.
    """
    if dtype == torch.float32:
        return

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    def cast_inputs(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return map_leaves(cast, args), map_leaves(cast, kwargs)

    model.register_forward_pre_hook(cast_inputs, with_kwargs=True)
    model.register_forward_hook(lambda _module, _inputs, outputs: map_leaves(to_fp32, outputs))
    wide = [name for name, b in model.named_buffers() if b.is_floating_point() and b.dtype != dtype]
    if wide:
        wrap_forward(model, functools.partial(_run_naming_buffers, wide, str(dtype).removeprefix("torch.")))


def cast_buffers(model: nn.Module, dtype: torch.dtype) -> None:
    """Give the floating buffers a type, as `data_types.buffer_dtype` has an engine do."""
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def _run_naming_buffers(wide: list[str], dtype: str, forward: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return forward(*args, **kwargs)
    except RuntimeError as error:
        if not re.search("dtype|scalar type", str(error)):
            raise
        names = ", ".join(wide[:6]) + (f" and {len(wide) - 6} more" if len(wide) > 6 else "")
        short = {"bfloat16": "bf16", "float16": "fp16"}[dtype]
        raise LoopError(
            f"a layer cannot join {dtype} weights with another type ({error}). The model has floating buffers that are "
            f'not {dtype}: {names}.\nWrite "data_types": {{"buffer_dtype": "{short}"}} into the DeepSpeed '
            "configuration, or cast there in the model's own forward: x + self.table.to(x.dtype)."
        ) from error
