"""`TensorGroup`: the process groups of a run whose processes share layers.

The rank of a process is (data, tensor), with tensor fastest: consecutive ranks share layers, and ranks with the same
index in their groups hold the same parts. Among the latter, gradients are averaged and ZeRO partitions.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from zero_plugin.errors import LoopError


class TensorGroup:
    """The processes that share this process's layers, and those that hold the same parts. Creating it is collective.

    Args:
        size: the number of processes that share each layer.

    Attributes:
        size: the number of processes that share each layer.
        rank: the index of this process among them, and of its part of each split weight.
        first: the rank, among all processes, of the first of them.
        group: torch's group of the processes that share this process's layers.
        data: torch's group of the processes that hold the same parts as this process, and get other samples.
        data_ranks: the ranks of `data`.
    """

    def __init__(self, size: int) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        self.size = size
        self.rank = rank % size
        self.first = rank - self.rank
        self.group, _ = dist.new_subgroups(group_size=size)  # type: ignore[no-untyped-call]
        every = [list(range(index, world, size)) for index in range(size)]
        self.data, _ = dist.new_subgroups_by_enumeration(every)  # type: ignore[no-untyped-call]
        self.data_ranks = every[self.rank]
        self._copies: dict[int, Any] = {size: self.group}

    def __deepcopy__(self, _: dict[int, Any]) -> TensorGroup:
        """Return the group itself: a copy of a model belongs to the same processes."""
        return self

    def __reduce__(self) -> Any:
        """Refuse pickling.

        Raises:
            LoopError: always: a process group exists in its processes only.
        """
        raise LoopError(
            "a model of tensor_parallel_size cannot be pickled (torch.save, copy to another process): its layers are "
            "parts that belong to this run's processes.\n"
            "Save complete weights with accelerator.save_model(model, folder)."
        )

    def make_copies_group(self, copies: int) -> None:
        """Create the groups of `copies` consecutive processes that hold the same part, once; collective over all."""
        if copies not in self._copies:
            self._copies[copies] = dist.new_subgroups(group_size=copies)[0]  # type: ignore[no-untyped-call]

    def copies_group(self, copies: int) -> Any:
        """Return torch's group of `copies` consecutive processes that hold the same part."""
        return self._copies[copies]

    def reduce_(self, tensor: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduce `tensor` over the processes that share layers, in place, without autograd. Return it."""
        dist.all_reduce(tensor, operation, self.group)
        return tensor
