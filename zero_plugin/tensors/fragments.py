"""What a checkpoint stores of a model: unpartitioned tensors by name, each as the piece that is in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from torch import Tensor, nn

from zero_plugin.errors import CheckpointError

WEIGHT: Final = "weight"
MASTER: Final = "master"


@dataclass(frozen=True, slots=True)
class Fragment:
    """A piece of one unpartitioned tensor, in this process' memory.

    Every process has a fragment of every tensor that is stored, an empty one where it holds nothing of it. It may have
    several: of a 32-bit weight under ZeRO the module's copy, and the optimizer's.

    Attributes:
        kind: `weight` for parameters and buffers, `master` for 32-bit copies of 16-bit weights, else the optimizer's
            own name of a state, e.g. `exp_avg`.
        name: of the parameter or buffer in the user's module.
        shape: of the unpartitioned tensor.
        start: where `values` begin in the flattened tensor, in elements.
        values: live memory, which reading fills: flat, or an unpartitioned tensor in any memory format.
        written: the range of the flattened `values` that this process writes. Over all processes and fragments each
            element of the tensor is written once.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    start: int
    values: Tensor
    written: tuple[int, int]

    @property
    def is_elsewhere(self) -> bool:
        """Whether what this process is to write is on a disk (NVMe), where no fragment reaches."""
        return self.values.numel() < self.written[1]

    def part_to_write(self) -> Tensor:
        """What of the values this process writes, flat.

        Raises:
            CheckpointError: it is not in memory.
        """
        if self.is_elsewhere:
            raise CheckpointError(f"{self.name} ({self.kind}) is not in memory, and nothing brings it there.")
        begin, end = self.written
        return self.values.reshape(-1)[begin:end]


def share_of(count: int, rank: int, world_size: int) -> tuple[int, int]:
    """The range of `count` equal elements that falls to a process where all hold the same."""
    return count * rank // world_size, count * (rank + 1) // world_size


def whole_fragment(name: str, tensor: Tensor, rank: int, world_size: int) -> Fragment:
    """The fragment of a weight or buffer that every process holds unpartitioned.

    Processes share the writing of a parameter. A buffer (running statistics, say) may differ between them, and must
    not become a patchwork: the first process' is stored.
    """
    is_parameter = isinstance(tensor, nn.Parameter)
    written = share_of(tensor.numel(), rank, world_size) if is_parameter else (0, 0 if rank else tensor.numel())
    return Fragment(WEIGHT, name, tuple(tensor.shape), 0, tensor.detach(), written)


def with_masters(weights: Iterable[Fragment], masters: Iterable[Fragment]) -> Iterator[Fragment]:
    """Weights and the optimizer's copies of them, each stored once.

    Of the same type, the optimizer's copy is the weight: training resumes from it, so it is what is written.
    The module's, where that is other memory, is only read.

    Args:
        weights: of the module; one that is not in memory follows from its master, as after a step.
        masters: the fp32 master weights, or whatever the optimizer steps, of kind `weight`. One that is no weight of
            the module is a master weight anyway.
    """
    stepped = {master.name: master for master in masters}
    for weight in weights:
        master = stepped.pop(weight.name, None)
        if master is None:
            yield weight
        elif master.values.dtype != weight.values.dtype:
            is_elsewhere = master.values.numel() and not weight.values.numel()  # on a disk, where no fragment reaches
            yield replace(master, values=master.values.to(weight.values.dtype)) if is_elsewhere else weight
            yield replace(master, kind=MASTER)
        else:
            if master.values.data_ptr() != weight.values.data_ptr():
                yield replace(weight, written=(0, 0))
            yield master
    for master in stepped.values():
        yield replace(master, kind=MASTER)
