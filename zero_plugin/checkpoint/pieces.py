"""The pieces of tensor files, each with its checksum: where they are cut, and what makes a complete set of them.

A file is cut where ranges of it were written, and at multiples of a size, so that a process can verify the very bytes
that it uses, and reads none of them twice.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from zero_plugin.checkpoint.folders import checksum
from zero_plugin.errors import CheckpointError, DamagedError

# The largest piece. A process that needs a part of one reads all of it; 16 bytes are kept of each.
PIECE_BYTES: Final = 2**20

Row = tuple[int, int, int, int]  # number of a file, first byte, end, checksum


def cut(start: int, end: int) -> Iterator[tuple[int, int]]:
    """The pieces of a range of a file: cut at the multiples of `PIECE_BYTES`."""
    while start < end:
        stop = min(end, start - start % PIECE_BYTES + PIECE_BYTES)
        yield start, stop
        start = stop


def encode_rows(rows: Sequence[Row]) -> str:
    """What a process has written, as a text for the others."""
    return base64.b64encode(np.array(rows, np.uint64).tobytes()).decode("ascii")


def decode_rows(texts: Iterable[str | None]) -> Any:
    """All processes' rows, uint64 of shape (rows, 4), from the texts of `encode_rows`."""
    data = b"".join(base64.b64decode(text or "") for text in texts)
    return np.frombuffer(data, np.uint64).reshape(-1, 4)


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of one file, of which each begins where the one before it ends.

    Attributes:
        ends: int64, ascending.
        sums: uint64, as many.
    """

    ends: Any
    sums: Any

    @classmethod
    def of(cls, header: bytes, rows: Any, size: int, refuse: Callable[[int, bool], CheckpointError]) -> Pieces:
        """What was written of a file, where that is all of it, and nothing twice.

        Args:
            header: the file's first bytes.
            rows: of all processes, uint64 of shape (rows, 4), in any order.
            size: of the file.
            refuse: the error for a byte that was written by nobody, or (True) more than once.

        Raises:
            CheckpointError: of `refuse`.
        """
        rows = rows[np.argsort(rows[:, 1], kind="stable")]
        first = list(cut(0, len(header)))
        starts = np.concatenate([[start for start, _ in first], rows[:, 1].astype(np.int64)]).astype(np.int64)
        ends = np.concatenate([[end for _, end in first], rows[:, 2].astype(np.int64)]).astype(np.int64)
        expected = np.concatenate([[0], ends])
        for place in np.flatnonzero(np.append(starts, size) != expected)[:1].tolist():
            found = starts[place] if place < len(starts) else size
            raise refuse(int(min(found, expected[place])), bool(found < expected[place]))
        own = np.array([checksum(header[start:end]) for start, end in first], np.uint64)
        return cls(ends, np.concatenate([own, rows[:, 3]]))

    @classmethod
    def decode(cls, table: Any, size: int) -> Pieces:
        """Of int64 of shape (pieces, 2), as `encode` makes it.

        Raises:
            DamagedError: these are no pieces of a file of `size` bytes.
        """
        if table.dtype != np.int64 or table.ndim != 2 or table.shape[1] != 2:
            raise DamagedError("the checksums are no table of pieces")
        ends = np.ascontiguousarray(table[:, 0])
        if bool((np.diff(ends, prepend=0) <= 0).any()) or (ends[-1] if ends.size else 0) != size:
            raise DamagedError("the checksums are not of pieces of this file")
        return cls(ends, np.ascontiguousarray(table[:, 1]).view(np.uint64))

    def encode(self) -> Any:
        """End and checksum of each piece, int64 of shape (pieces, 2)."""
        return np.stack([self.ends, self.sums.view(np.int64)], axis=1)

    def covering(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """First byte, end and checksum of the pieces that hold the bytes from `start` to `end`."""
        first, last = np.searchsorted(self.ends, [start, end], side="right").tolist()
        last = min(last + 1, len(self.ends))
        before = int(self.ends[first - 1]) if first else 0
        for stop, found in zip(self.ends[first:last].tolist(), self.sums[first:last].tolist(), strict=True):
            if before >= end:
                return
            yield before, stop, found
            before = stop
