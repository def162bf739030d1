"""Reads a whole checkpoint again in one process, and compares it with its checksums."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Final

import torch

from zero_plugin.checkpoint.manifest import Manifest, checksum_of_file
from zero_plugin.checkpoint.place import Place
from zero_plugin.checkpoint.ranges import RangeReader, open_reader

__all__ = ["find_differences"]

_PIECE: Final = 2**24  # elements between two reports


def find_differences(
    folder: Path, manifest: Manifest, progress: Callable[[int], None], *, skipped: Collection[str] = ()
) -> Iterator[str]:
    """Every tensor and every other file that differs from its checksum; a staging buffer is all that is in memory.

    Args:
        folder: of a checkpoint.
        manifest: its.
        progress: told the bytes that were read.
        skipped: files that are not read, since they have other sizes.
    """
    with open_reader(folder) as reader:
        for model in manifest.models:
            for (kind, name), place in model.places.items():
                if place.file not in skipped and _sums(reader, place, progress) != model.sums[kind, name]:
                    yield f"{place.file}: {name} ({kind}) differs from its checksum"
    for path, (size, checksum) in manifest.files.items():
        if checksum is None or path in skipped:
            continue
        if checksum_of_file(folder / path) != checksum:
            yield f"{path} differs from its checksum"
        progress(size)


def _sums(reader: RangeReader, place: Place, progress: Callable[[int], None]) -> tuple[int, int]:
    total = torch.zeros(2, dtype=torch.int64)
    count = math.prod(place.shape)
    for begin in range(0, count, _PIECE):
        end = min(begin + _PIECE, count)
        total += reader.sums(place, (begin, end))
        progress((end - begin) * place.dtype.itemsize)
    first, second = total.tolist()
    return first, second
