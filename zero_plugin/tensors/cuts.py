"""`Cut`: which part of a complete tensor a process holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Cut:
    """A process's part of one tensor, cut along one dimension.

    Attributes:
        shape: shape of the complete tensor.
        dim: the dimension that is cut.
        ranges: the (start, length) of each piece along `dim`. The part is the pieces, one after the other.
        filler: number of entries along `dim` after the pieces. They belong to no complete tensor, and are zero.
        copies: number of consecutive processes that hold the same part.
        is_first_copy: whether this process is the first of them. Sums over all elements count this copy only.
    """

    shape: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[int, int], ...]
    filler: int = 0
    copies: int = 1
    is_first_copy: bool = True

    @property
    def length(self) -> int:
        """The part's size along `dim`."""
        return sum(length for _, length in self.ranges) + self.filler

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return (*self.shape[: self.dim], self.length, *self.shape[self.dim + 1 :])

    def take(self, whole: Tensor) -> Tensor:
        """Return a copy of the part of a complete tensor."""
        pieces = [whole.narrow(self.dim, start, length) for start, length in self.ranges]
        if self.filler:
            shape = [*whole.shape]
            shape[self.dim] = self.filler
            pieces.append(whole.new_zeros(shape))
        return torch.cat(pieces, self.dim).contiguous()

    def put(self, part: Tensor, whole: Tensor) -> None:
        """Write the part into a complete tensor."""
        at = 0
        for start, length in self.ranges:
            whole.narrow(self.dim, start, length).copy_(part.narrow(self.dim, at, length))
            at += length

    def runs(self, start: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Map a range of the flattened part to the flattened complete tensor.

        Args:
            start: the first element of the range in the flattened part.
            count: the number of elements.

        Yields:
            The (start in the complete tensor, start in the part, length) of each contiguous run, in the part's order.
            Filler is left out.
        """
        inner = 1
        for size in self.shape[self.dim + 1 :]:
            inner *= size
        row, whole_row = self.length * inner, self.shape[self.dim] * inner
        end = start + count
        for outer in range(start // row if row else 0, -(-end // row) if row else 0):
            at = outer * row
            for begin, length in self.ranges:
                first, last = max(start, at), min(end, at + length * inner)
                if first < last:
                    yield outer * whole_row + begin * inner + first - at, first, last - first
                at += length * inner
