"""Whether gradients are finite, in one pass over them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["all_finite", "dense"]


def all_finite(gradients: Sequence[Tensor], factor: float = 1.0) -> bool:
    """Multiply the gradients by `factor`, and tell whether all are finite: one pass over them, as GradScaler's."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        alike.setdefault((gradient.device, gradient.dtype), []).append(dense(gradient))
    for (device, _), tensors in alike.items():
        found = torch.zeros(1, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, torch.full((1,), factor, device=device))
        if found.item():
            return False
    return True


def dense(gradient: Tensor) -> Tensor:
    """The numbers of a gradient that may be sparse."""
    return gradient._values() if gradient.is_sparse else gradient
