"""What a script asks of its processes: who it is among them, waiting for them, and collecting from them."""

from __future__ import annotations

from typing import Any

from zero_plugin import collectives
from zero_plugin.errors import LoopError
from zero_plugin.strategies.processes import Processes

__all__ = ["ProcessCalls"]


class ProcessCalls:
    """The calls of the facade, and of `PartialState`, that concern processes."""

    _processes: Processes

    @property
    def num_processes(self) -> int:
        """Processes of the run."""
        return self._processes.world_size

    @property
    def process_index(self) -> int:
        """This process among all, from 0."""
        return self._processes.rank

    @property
    def local_process_index(self) -> int:
        """This process on its machine, from 0."""
        return self._processes.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is process 0."""
        return self._processes.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is its machine's process 0."""
        return self._processes.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last process."""
        return self._processes.rank == self._processes.world_size - 1

    def wait_for_everyone(self) -> None:
        """Return when every process has come here."""
        self._processes.barrier()

    def print(self, *values: Any, **kwargs: Any) -> None:
        """`print`, on the main process only."""
        if self.is_main_process:
            print(*values, **kwargs)  # noqa: T201 - what it is for

    def gather(self, tree: Any) -> Any:
        """Tensors of all processes, joined along their first dimension; containers keep their shape."""
        return collectives.gather(tree)

    def reduce(self, tree: Any, reduction: str = "sum") -> Any:
        """Tensors summed or averaged (`mean`) over all processes."""
        if reduction not in ("sum", "mean"):
            raise LoopError(f"reduce(reduction={reduction!r}): write 'sum' or 'mean'.")
        return collectives.reduce(tree, "sum" if reduction == "sum" else "mean")

    def pad_across_processes(self, tree: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Tensors padded along `dim` to the longest among the processes."""
        return collectives.pad_across_processes(tree, dim, pad_index, pad_first)
