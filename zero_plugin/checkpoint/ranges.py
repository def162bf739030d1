"""Writes and reads ranges of tensor files, with checksums.

Writes and reads ranges of tensor files: each process just the bytes that it owns, or needs.

A checksum of tensors that processes can compute in pieces, in any order, and add up.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zero_plugin.errors import CheckpointError
from zero_plugin.machine.durable_files import start_writing
from zero_plugin.tensors.fragments import Fragment
from zero_plugin.tensors.model_folder import Place

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


_STAGING_BYTES: Final = 2**25  # what is on a GPU, of another type or not contiguous passes through so much host memory


class _Files:
    """The files of a checkpoint, each opened once."""

    def __init__(self, folder: Path, flags: int) -> None:
        self.folder = folder
        self._flags = flags
        self.open: dict[str, int] = {}

    def descriptor(self, file: str) -> int:
        if file not in self.open:
            try:
                self.open[file] = os.open(self.folder / file, self._flags)
            except FileNotFoundError:
                raise CheckpointError(
                    f"{self.folder / file} is there for the main process, but not for this one: checkpoints need a "
                    "file system that all machines share."
                ) from None
        return self.open[file]

    @contextmanager
    def named(self, file: str) -> Iterator[int]:
        """The file's descriptor; errors of the system inside name the file."""
        try:
            yield self.descriptor(file)
        except OSError as error:
            error.filename = str(self.folder / file)
            raise

    def close(self) -> None:
        for descriptor in self.open.values():
            os.close(descriptor)
        self.open.clear()


class RangeWriter:
    """See `open_writer`."""

    def __init__(self, files: _Files) -> None:
        self._files = files

    def write(self, fragment: Fragment, place: Place, *, summed: bool = True) -> Tensor:
        """Write what of a fragment is this process' to write, in the type of `place`.

        Args:
            fragment: whose values are in memory, on any device and of any type.
            place: of the whole tensor.
            summed: whether the checksum is wanted.

        Returns:
            The checksum of what was written (`sum_words`); zeros for nothing, or where it is not wanted.

        Raises:
            CheckpointError: they are not in memory.
        """
        if fragment.is_elsewhere:
            raise CheckpointError(f"{fragment.name} ({fragment.kind}) is not in memory, and nothing brings it there.")
        begin, end = fragment.written
        sums = torch.zeros(2, dtype=torch.int64)
        if begin == end:
            return sums
        flat = fragment.values.reshape(-1)[begin:end]
        step = _STAGING_BYTES // max(flat.element_size(), place.dtype.itemsize)
        for offset in range(0, flat.numel(), step):
            chunk = flat[offset : offset + step].to("cpu", place.dtype).contiguous()
            first = fragment.start + begin + offset
            with self._files.named(place.file) as descriptor:
                position = place.start + first * chunk.element_size()
                _write_all(descriptor, _bytes_of(chunk), position)
                start_writing(descriptor, position, chunk.nbytes)
            if summed:
                sums += sum_words(chunk, first)
        return sums

    def sync(self) -> None:
        """Wait until the disk has everything that this process wrote."""
        for file in self._files.open:
            with self._files.named(file) as descriptor:
                os.fsync(descriptor)


class RangeReader:
    """See `open_reader`."""

    def __init__(self, files: _Files) -> None:
        self._files = files

    def read(self, place: Place, fragment: Fragment) -> None:
        """Fill a fragment from the whole tensor of the same shape that is stored at `place`, in whatever type."""
        target = fragment.values
        if target.numel() == 0:
            return
        if target.is_contiguous() and target.device.type == "cpu" and target.dtype == place.dtype:
            self._fill(place, fragment.start, target.view(-1))
            return
        if not target.is_contiguous():
            read = torch.empty(target.numel(), dtype=place.dtype)
            self._fill(place, fragment.start, read)
            target.copy_(read.view(target.shape))
            return
        flat = target.view(-1)
        staging = torch.empty(min(flat.numel(), _STAGING_BYTES // place.dtype.itemsize), dtype=place.dtype)
        for offset in range(0, flat.numel(), staging.numel()):
            part = flat[offset : offset + staging.numel()]
            self._fill(place, fragment.start + offset, staging[: part.numel()])
            part.copy_(staging[: part.numel()])

    def sums(self, place: Place, share: tuple[int, int]) -> Tensor:
        """The checksum of a range of a stored tensor's elements."""
        total = torch.zeros(2, dtype=torch.int64)
        begin, end = share
        staging = torch.empty(min(max(end - begin, 1), _STAGING_BYTES // place.dtype.itemsize), dtype=place.dtype)
        for first in range(begin, end, staging.numel()):
            part = staging[: min(staging.numel(), end - first)]
            self._fill(place, first, part)
            total += sum_words(part, first)
        return total

    def _fill(self, place: Place, first: int, flat: Tensor) -> None:
        _read_all(self._files, place, _bytes_of(flat), place.start + first * flat.element_size())


@contextmanager
def open_writer(folder: Path) -> Iterator[RangeWriter]:
    """Writes into files below `folder` that exist at full size."""
    files = _Files(folder, os.O_WRONLY)
    try:
        yield RangeWriter(files)
    finally:
        files.close()


@contextmanager
def open_reader(folder: Path) -> Iterator[RangeReader]:
    """Reads from files below `folder`."""
    files = _Files(folder, os.O_RDONLY)
    try:
        yield RangeReader(files)
    finally:
        files.close()


def _bytes_of(flat: Tensor) -> memoryview:
    return flat.view(torch.uint8).numpy().data


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data.nbytes:
        written = os.pwrite(descriptor, data, offset)  # Linux writes 2 GiB at most
        data, offset = data[written:], offset + written


def _read_all(files: _Files, place: Place, data: memoryview, offset: int) -> None:
    while data.nbytes:
        read = os.preadv(files.descriptor(place.file), [data], offset)
        if read == 0:
            raise CheckpointError(f"{files.folder / place.file} ends before byte {offset + data.nbytes}.")
        data, offset = data[read:], offset + read
