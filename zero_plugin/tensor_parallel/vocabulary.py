"""The cross entropy of logits whose words are divided among the processes of a group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from zero_plugin.distributed.tensor_group import TensorGroup
from zero_plugin.tensor_parallel.exchange import reduced


def summed_cross_entropy(
    logits: Tensor, labels: Tensor, start: int, count: int, group: TensorGroup, ignored: int
) -> Tensor:
    """Sum the cross entropy over tokens. No process has complete logits; each exchanges three numbers per token.

    Args:
        logits: of shape (tokens, words of this process), in fp32. Words from `count` on are filler.
        labels: of shape (tokens,): the same on all processes, as numbers of the complete vocabulary.
        start: the number of this process's first word.
        count: the number of its words.
        group: the processes.
        ignored: the label of tokens that do not count.

    Returns:
        A scalar, the same on all processes.
    """
    loss: Tensor = _CrossEntropy.apply(logits, labels, start, count, group, ignored)  # type: ignore[no-untyped-call]
    return loss


class _CrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, start: int, count: int, group: TensorGroup, ignored: int
    ) -> Tensor:
        counts = labels != ignored
        largest = logits.new_full(logits.shape[:1], -torch.inf)
        if count:
            largest = logits[:, :count].amax(1)
        reduced(largest, group, dist.ReduceOp.MAX)
        powers = (logits - largest[:, None]).exp_()
        powers[:, count:] = 0
        own = labels - start
        is_own = counts & (own >= 0) & (own < count)
        own = own.masked_fill(~is_own, 0)
        target = (logits.gather(1, own[:, None]).squeeze(1) - largest).masked_fill(~is_own, 0.0)
        totals, target = reduced(torch.stack([powers.sum(1), target]), group)
        ctx.save_for_backward(powers.div_(totals[:, None]), own, is_own, counts)
        loss: Tensor = ((totals.log() - target) * counts).sum()
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        powers, own, is_own, counts = ctx.saved_tensors
        powers = powers.clone()  # a second backward through the same graph reads them again
        powers[torch.arange(len(own), device=own.device), own] -= is_own.to(powers.dtype)
        powers *= (counts * gradients[0])[:, None]
        return powers, None, None, None, None, None
