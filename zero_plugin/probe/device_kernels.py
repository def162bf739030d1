"""Lets a trace on the CPU keep for the backward what a GPU's kernels keep."""

from __future__ import annotations

import inspect
import math
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from zero_plugin.nested import map_leaves, to_fp32

__all__ = ["DeviceKernels"]

# What CUDA's autocast runs in fp32 and the CPU's does not, of what models are made of (torch's "Automatic Mixed
# Precision package", "CUDA Ops that can autocast to float32").
_WIDE: Final = frozenset(
    (
        *(F.layer_norm, F.group_norm, F.softmax, F.log_softmax, F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss),
        *(F.smooth_l1_loss, F.softplus, F.normalize, F.cosine_similarity, F.binary_cross_entropy_with_logits, F.kl_div),
        *(torch.softmax, torch.log_softmax, torch.layer_norm, torch.group_norm, torch.pow, torch.rsqrt, torch.exp),
        *(torch.log, torch.sum, torch.prod, torch.cumsum, torch.norm, Tensor.softmax, Tensor.log_softmax, Tensor.pow),
        *(Tensor.__pow__, Tensor.rsqrt, Tensor.exp, Tensor.log, Tensor.sum, Tensor.prod, Tensor.cumsum, Tensor.norm),
    )
)
_GROUPED: Final = (getattr(F, "grouped_mm", None), torch._grouped_mm)  # the first is torch 2.10's
_MULTI_HEAD: Final = inspect.signature(F.multi_head_attention_forward)


class DeviceKernels(TorchFunctionMode):
    """While it is entered, operations on CPU tensors keep what CUDA's keep: right in shapes and bytes, not in values.

    * Attention is one kernel, which keeps queries, keys, values, bias, output, and the logarithm of each soft-max in
      fp32 (FlashAttention-2, arXiv:2307.08691; the memory-efficient kernel keeps the same).
    * The product of a mixture's experts counts as one, too.
    * Dropout keeps a mask of one byte per element, where the CPU keeps a tensor of the input's type.
    * Autocast runs in fp32 what CUDA's does.

    Attributes:
        flops: floating-point operations of the attention kernels' forwards; a causal one computes half of the scores.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch, as a GPU would."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:  # what it calls inside is not seen here
            return _attend_in_heads(*args, **kwargs)
        if func in _GROUPED and args[0].dim() == 2 and args[1].dim() == 3:
            self.flops += 2 * args[0].numel() * args[1].shape[-1]
            return _GroupedProduct.apply(args[0], args[1])  # type: ignore[no-untyped-call]
        if func is torch.Tensor.data_ptr:
            return 0  # there is no memory, and a GPU's is aligned, which transformers looks at up to torch 2.10
        if func in (F.dropout, torch.dropout):
            return _drop(*args, **kwargs)
        if func in _WIDE and torch.is_autocast_enabled("cpu"):
            args, kwargs = map_leaves(to_fp32, args), map_leaves(to_fp32, kwargs)
        return func(*args, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,  # noqa: ARG002 - the kernels keep a seed
        is_causal: bool = False,
        scale: float | None = None,  # noqa: ARG002
        enable_gqa: bool = False,  # noqa: ARG002
    ) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)  # each call makes its own bias of the mask
        scores = math.prod(query.shape[:-1]) * key.shape[-2]
        self.flops += 2 * scores * (query.shape[-1] + value.shape[-1]) * (0.5 if is_causal else 1.0)
        return _FusedAttention.apply(query, key, value, attn_mask)  # type: ignore[no-any-return, no-untyped-call]


class _FusedAttention(torch.autograd.Function):
    """Shapes: query [..., heads, tokens, width], key and value [..., kv_heads, kv_tokens, width]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        *rest, tokens, _ = query.shape
        # tokens outside of heads in memory, as the kernels lay it out: joining the heads then costs no copy
        output = query.new_empty((*rest[:-1], tokens, *rest[-1:], value.shape[-1])).movedim(-2, len(rest) - 1)
        logarithms = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, logarithms, bias)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # noqa: ARG004
        query, key, value, _, _, bias = ctx.saved_tensors
        wide = torch.empty_like(query, dtype=torch.float32)  # FlashAttention-2 adds the queries' gradient up in fp32
        made = [torch.empty_like(tensor) for tensor in (query, key, value)]
        del wide
        return *made, torch.empty_like(bias) if bias is not None and bias.requires_grad else None


class _GroupedProduct(torch.autograd.Function):
    """The experts' product: rows [tokens, width] in groups, one matrix [groups, width, out] each. For any type.

    Fake tensors know it in bf16 only.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor) -> Tensor:
        ctx.save_for_backward(rows, matrices)
        return rows.new_empty(rows.shape[0], matrices.shape[-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # noqa: ARG004
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors)


def _attend_in_heads(*args: Any, **kwargs: Any) -> Any:
    """`nn.MultiheadAttention` by torch's fused kernel for CPUs, which takes no dropout, unless scores are asked for."""
    call = _MULTI_HEAD.bind(*args, **kwargs)
    call.apply_defaults()
    if not call.arguments["need_weights"]:
        call.arguments["dropout_p"] = 0.0
    return F.multi_head_attention_forward(*call.args, **call.kwargs)


def _drop(
    input: Tensor,  # noqa: A002 - torch's name, by which it may be given
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,  # noqa: ARG001 - which changes no bytes where something is kept for the backward
    *,
    train: bool | None = None,
) -> Tensor:
    is_active = training if train is None else train
    return torch.native_dropout(input, p, True)[0] if is_active and p > 0 else input
