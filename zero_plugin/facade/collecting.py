"""What a script collects from its processes: tensors gathered, reduced, padded and broadcast, and a trigger."""

from __future__ import annotations

from typing import Any

import torch

from zero_plugin.distributed import collectives
from zero_plugin.distributed.collective_check import collective
from zero_plugin.distributed.collectives import Reduction


class CollectingCalls:
    """The calls of the facade that exchange tensors; all are collective."""

    _triggered = False

    def gather(self, tensor: Any) -> Any:
        """Tensors of all processes, joined along their first dimension; containers keep their shape.

        A 0-dimensional tensor counts as one row, on one process too: shape (processes,).
        """
        return collectives.gather(tensor)

    def reduce(self, tensor: Any, reduction: Reduction = "sum", scale: float = 1.0) -> Any:
        """The `sum`, `mean` or `max` of each tensor over all processes, or its own (`none`), times `scale`."""
        return collectives.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Tensors padded along `dim` to the longest among the processes, behind or in front."""
        return collectives.pad_across_processes(tensor, dim, pad_index, pad_first)

    def broadcast(self, tensor: Any, from_process: int = 0) -> Any:
        """Tensors of process `from_process`, on every process; shapes and dtypes are the same everywhere before."""
        return collectives.broadcast(tensor, from_process)

    def set_trigger(self) -> None:
        """Let the next `check_trigger` be true on every process; not collective."""
        self._triggered = True

    @collective("check_trigger")
    def check_trigger(self) -> bool:
        """Whether any process has called `set_trigger` since the last check."""
        triggered = int(collectives.reduce(torch.tensor(int(self._triggered)), "sum")) > 0
        if triggered:
            self._triggered = False
        return triggered
