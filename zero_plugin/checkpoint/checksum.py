"""A checksum of tensors that processes can compute in pieces, in any order, and add up."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["sum_words"]

_WORD: Final = 8  # bytes
_COLUMNS: Final = 512
_ROWS: Final = 2**8  # so that both passes over a chunk find it in the cache
_ROW_STARTS: Final = np.arange(_ROWS, dtype=np.uint64) * np.uint64(_COLUMNS)
_COLUMN_PLACES: Final = np.arange(_COLUMNS, dtype=np.uint64)


def sum_words(flat: Tensor, first: int) -> Tensor:
    """Σ w and Σ (i + 1) w over the 8-byte words w of a tensor's memory, at places i, modulo 2⁶⁴.

    The first sum changes with any one word, the second with their order too, as in Fletcher's checksum (Fletcher 1982).
    Both are linear: the pieces' sums add up to those of the whole. A word that a piece has a part of counts with zeros
    for its other bytes.

    Args:
        flat: 1-D on the CPU: a piece of the flattened tensor.
        first: place of its first element.

    Returns:
        int64 of shape (2,).
    """
    data = flat.view(torch.uint8).numpy()
    begin = first * flat.element_size()
    head = min(-begin % _WORD, data.size)
    tail = head + (data.size - head) // _WORD * _WORD
    plain = placed = 0
    for start, end in ((0, head), (head, tail), (tail, data.size)):
        place, inside = divmod(begin + start, _WORD)
        words = data[start:end]
        if words.size % _WORD:
            words = np.pad(words, (inside, _WORD - inside - words.size))
        sums = _sums(words.view(np.uint64))
        plain += sums[0]
        placed += sums[1] + (place + 1) * sums[0]
    return torch.from_numpy(np.array([plain % 2**64, placed % 2**64], np.uint64).view(np.int64))


def _sums(words: NDArray[np.uint64]) -> tuple[int, int]:
    """Σ w and Σ i w; by the sums of rows and columns, which processors add up many at a time."""
    plain = placed = 0
    for begin in range(0, words.size, _ROWS * _COLUMNS):
        chunk = words[begin : begin + _ROWS * _COLUMNS]
        rows = chunk.size // _COLUMNS
        body, rest = chunk[: rows * _COLUMNS].reshape(rows, _COLUMNS), chunk[rows * _COLUMNS :]
        of_rows, of_columns = body.sum(1), body.sum(0)
        total = int(of_rows.sum()) + int(rest.sum())
        plain += total
        placed += begin * total + rows * _COLUMNS * int(rest.sum())
        placed += int((of_rows * _ROW_STARTS[:rows]).sum())
        placed += int((of_columns * _COLUMN_PLACES).sum()) + int((rest * _COLUMN_PLACES[: rest.size]).sum())
    return plain, placed
