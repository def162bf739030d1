"""The collectives of a split layer, in its forward and its backward.

A split layer begins with `enter` and ends with `total`. All processes have the same input and the same output. In
between, each process computes with its part of the weights.

* `enter`: the forward returns its input. The backward sums the gradients of the parts.
* `total`: the forward sums the results of the parts. The backward returns its gradient, which all processes have.
* `gather`: the forward joins the results of the parts. The backward cuts the gradient.

This is the scheme of Megatron-LM (arXiv:1909.08053): one sum in the forward and one in the backward of each layer. The
functions communicate nothing for fake tensors, with which a plan traces activations.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import Function, once_differentiable

from zero_plugin.distributed.tensor_group import TensorGroup


def enter(tensor: Tensor, group: TensorGroup) -> Tensor:
    """Return `tensor`; the backward sums its gradients over the group."""
    entered: Tensor = _Enter.apply(tensor, group)  # type: ignore[no-untyped-call]
    return entered


def total(part: Tensor, group: TensorGroup) -> Tensor:
    """Return the sum over the group. Overwrites `part`, which must be a new result and not a view."""
    summed: Tensor = _Total.apply(part, group)  # type: ignore[no-untyped-call]
    return summed


def gather(part: Tensor, group: TensorGroup) -> Tensor:
    """Join the parts of all processes along the last dimension."""
    joined: Tensor = _Gather.apply(part, group)  # type: ignore[no-untyped-call]
    return joined


def reduced(tensor: Tensor, group: TensorGroup, operation: Any = dist.ReduceOp.SUM) -> Tensor:
    """Reduce `tensor` over the group in place, and return it."""
    return tensor if isinstance(tensor, FakeTensor) else group.reduce_(tensor, operation)


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return reduced(gradients[0].clone(memory_format=torch.contiguous_format), ctx.group), None


class _Total(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: TensorGroup) -> Tensor:
        ctx.mark_dirty(part)
        return reduced(part, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:  # noqa: ARG004 - torch's signature
        return gradients[0], None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size)]
        if not isinstance(part, FakeTensor):
            dist.all_gather(parts, part.contiguous(), group=group.group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        length = gradients[0].shape[-1] // ctx.group.size
        return gradients[0].narrow(-1, ctx.group.rank * length, length), None
