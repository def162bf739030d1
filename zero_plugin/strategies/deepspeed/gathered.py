"""Parameters that ZeRO-3 has partitioned, whole for a while."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from deepspeed import zero
from torch import Tensor, nn

__all__ = ["gathered_parameters"]


def gathered_parameters(
    parameters: Iterable[Tensor], modifier_rank: int | None, forward_of: nn.Module | None
) -> AbstractContextManager[Any]:
    """Inside, the parameters are whole on every process; collective.

    Args:
        parameters: may hold some that are not partitioned.
        modifier_rank: the process whose changes stay; None where none changes them.
        forward_of: the module whose forward this happens in, if it does: they are then gathered with its own.
    """
    partitioned = [p for p in parameters if hasattr(p, "ds_id")]
    context: AbstractContextManager[Any] = zero.GatheredParameters(partitioned, modifier_rank, forward_of)
    return context
