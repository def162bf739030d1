"""Whether gradients are finite, in one pass over them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from math import isfinite

import torch
from torch import Tensor

__all__ = ["all_finite", "dense"]


def all_finite(gradients: list[Tensor], factor: float = 1.0, before_reading: Callable[[], None] | None = None) -> bool:
    """Multiply the gradients by `factor`, and tell whether all are finite: one pass over them, as GradScaler's.

    On XLA finite gradients count as not finite where those of one parameter add up beyond their type's largest number;
    a norm, which clipping needs, overflows sooner.

    Args:
        gradients: sparse ones too.
        factor: of a loss scale, which is not used on XLA.
        before_reading: called before the answer is read from the device.
    """
    kinds = {(gradient.device, gradient.dtype, gradient.is_sparse) for gradient in gradients}
    for device, dtype, is_sparse in kinds:
        tensors = gradients  # nearly always; sorting those of a small model would take longer than the pass
        if is_sparse or dtype.is_complex or len(kinds) > 1:
            kind = device, dtype, is_sparse
            tensors = [dense(g) for g in gradients if (g.device, g.dtype, g.is_sparse) == kind]
        if device.type == "xla" and factor == 1.0:
            # Each operation that is noted down there costs time, and those in place take copies.
            sums = torch.stack([tensor.sum() for tensor in tensors])
            if before_reading is not None:
                before_reading()
            if not all(map(isfinite, sums.tolist())):
                return False
            continue
        flag = _flag(device)
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, flag, _number(factor, device))
        if before_reading is not None:
            before_reading()
        if flag.item():
            flag.zero_()
            return False
    return True


def dense(gradient: Tensor) -> Tensor:
    """The numbers of a gradient that may be sparse, or complex, as real ones in the same memory."""
    values = gradient._values() if gradient.is_sparse else gradient
    return torch.view_as_real(values) if values.is_complex() else values


# Making these two at each step would take longer than the pass over a small model.


@cache
def _flag(device: torch.device) -> Tensor:
    """Where the kernel writes 1 if something is not finite; 0 between two calls."""
    return torch.zeros(1, device=device)


@lru_cache(maxsize=64)
def _number(value: float, device: torch.device) -> Tensor:
    return torch.full((1,), value, device=device)
