"""Writes and reads ranges of tensor files, each process just the bytes that it owns or needs, with checksums.

The checksum is one that processes can compute in pieces, in any order, and add up.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from zero_plugin.errors import CheckpointError
from zero_plugin.machine.durable_files import start_writing
from zero_plugin.tensors.fragments import Fragment
from zero_plugin.tensors.model_folder import Place

_STAGING_BYTES: Final = 2**25  # what is on a GPU, of another dtype or not contiguous passes through so much CPU memory
_WORD: Final = 8  # bytes
_PLACES: Final = np.arange(2**17, dtype=np.uint64)  # of words in a chunk of 1 MiB, which stays in the cache


def sum_words(flat: Tensor, first: int) -> Tensor:
    """Σ w and Σ (i + 1) w over the 8-byte words w of a tensor's memory, at places i, modulo 2⁶⁴.

    The first sum changes with any one word, the second with their order too, as in Fletcher's checksum (Fletcher 1982).
    Both are linear: the pieces' sums add up to those of all of it. A word that a piece has a part of counts with zeros
    for its other bytes.

    Args:
        flat: 1-D on the CPU: a piece of the flattened tensor.
        first: place of its first element.

    Returns:
        int64 of shape (2,).
    """
    data = flat.view(torch.uint8).numpy()
    place, inside = divmod(first * flat.element_size(), _WORD)
    beyond = -(inside + data.size) % _WORD
    if inside or beyond:
        data = np.pad(data, (inside, beyond))
    words = data.view(np.uint64)
    plain = placed = 0
    for begin in range(0, words.size, _PLACES.size):
        chunk = words[begin : begin + _PLACES.size]
        total = int(chunk.sum())
        plain += total
        placed += (place + begin + 1) * total + int(np.dot(chunk, _PLACES[: chunk.size]))
    return torch.from_numpy(np.array([plain % 2**64, placed % 2**64], np.uint64).view(np.int64))


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


class RangeWriter(_Files):
    """Writes into files that exist at full size."""

    def write(self, fragment: Fragment, place: Place, *, summed: bool = True) -> Tensor:
        """Write what of a fragment is this process' to write, in the dtype of `place`.

        Args:
            fragment: whose values are in memory, on any device and of any dtype.
            place: of the unpartitioned tensor.
            summed: whether the checksum is wanted.

        Returns:
            The checksum of what was written (`sum_words`); zeros for nothing, or where it is not wanted.

        Raises:
            CheckpointError: they are not in memory.
        """
        sums = torch.zeros(2, dtype=torch.int64)
        flat = fragment.part_to_write()
        step = _STAGING_BYTES // max(flat.element_size(), place.dtype.itemsize)
        for offset in range(0, flat.numel(), step):
            chunk = flat[offset : offset + step].to("cpu", place.dtype).contiguous()
            first = fragment.start + fragment.written[0] + offset
            with self.named(place.file) as descriptor:
                position = place.start + first * chunk.element_size()
                _write_all(descriptor, _bytes_of(chunk), position)
                start_writing(descriptor, position, chunk.nbytes)
            if summed:
                sums += sum_words(chunk, first)
        return sums

    def sync(self) -> None:
        """Wait until the disk has everything that this process wrote."""
        for file in self.open:
            with self.named(file) as descriptor:
                os.fsync(descriptor)


class RangeReader(_Files):
    """Reads from files, or computes checksums of what is in them."""

    def read(self, place: Place, fragment: Fragment) -> None:
        """Fill a fragment from the unpartitioned tensor that is stored at `place`, of the same shape and any dtype."""
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

    def sums(self, place: Place, part: tuple[int, int], progress: Callable[[int], None] = lambda _: None) -> Tensor:
        """The checksum of a range of a stored tensor's elements; `progress` is called with the bytes that were read."""
        total = torch.zeros(2, dtype=torch.int64)
        begin, end = part
        staging = torch.empty(min(max(end - begin, 1), _STAGING_BYTES // place.dtype.itemsize), dtype=place.dtype)
        for first in range(begin, end, staging.numel()):
            chunk = staging[: end - first]
            self._fill(place, first, chunk)
            total += sum_words(chunk, first)
            progress(chunk.nbytes)
        return total

    def _fill(self, place: Place, first: int, flat: Tensor) -> None:
        data, offset = _bytes_of(flat), place.start + first * flat.element_size()
        while data.nbytes:
            read = os.preadv(self.descriptor(place.file), [data], offset)
            if read == 0:
                raise CheckpointError(f"{self.folder / place.file} ends before byte {offset + data.nbytes}.")
            data, offset = data[read:], offset + read


def open_writer(folder: Path) -> closing[RangeWriter]:
    """Writes into files below `folder` that exist at full size."""
    return closing(RangeWriter(folder, os.O_WRONLY))


def open_reader(folder: Path) -> closing[RangeReader]:
    """Reads from files below `folder`."""
    return closing(RangeReader(folder, os.O_RDONLY))


def _bytes_of(flat: Tensor) -> memoryview:
    return flat.view(torch.uint8).numpy().data


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data.nbytes:
        written = os.pwrite(descriptor, data, offset)  # Linux writes 2 GiB at most
        data, offset = data[written:], offset + written
