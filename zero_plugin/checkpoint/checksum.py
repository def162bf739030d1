"""A checksum of tensors that processes can compute in pieces, in any order, and add up."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

__all__ = ["sum_words", "word_type"]

_COLUMNS: Final = 1024
_CHUNK: Final = 2**20  # words at a time, so that both passes find them in the cache

_WORDS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def word_type(dtype: torch.dtype) -> torch.dtype:
    """The integer type as wide as `dtype`."""
    return _WORDS[dtype.itemsize]


def sum_words(words: Tensor, start: int) -> Tensor:
    """Σ w and Σ (i + 1) w over the words w at places i of a whole tensor, modulo 2⁶⁴.

    The first sum changes with any one word, the second with their order too, as in Fletcher's checksum (Fletcher 1982).
    Both are linear: the pieces' sums add up to those of the whole.

    Args:
        words: 1-D on the CPU, of a `word_type`: a piece of the flattened tensor's bits.
        start: place of the first of them.

    Returns:
        int64 of shape (2,).
    """
    totals = torch.zeros(2, dtype=torch.int64)
    for begin in range(0, words.numel(), _CHUNK):
        chunk = words[begin : begin + _CHUNK]
        rows = chunk.numel() // _COLUMNS
        body, tail = chunk[: rows * _COLUMNS].view(rows, _COLUMNS), chunk[rows * _COLUMNS :].long()
        row_sums, column_sums = body.sum(1, dtype=torch.int64), body.sum(0, dtype=torch.int64)
        plain = row_sums.sum() + tail.sum()
        placed = (
            (row_sums * torch.arange(0, rows * _COLUMNS, _COLUMNS)).sum()
            + (column_sums * torch.arange(_COLUMNS)).sum()
            + (tail * torch.arange(rows * _COLUMNS, chunk.numel())).sum()
        )
        totals += torch.stack([plain, placed + plain * (start + begin + 1)])
    return totals
