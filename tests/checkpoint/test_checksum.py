"""The checksums of pieces: where pieces are cut, what the checksums detect, and which sets are incomplete."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from zero_plugin.checkpoint.manifest import checksum
from zero_plugin.checkpoint.tensor_files import PIECE_BYTES, Pieces, RangeReader, cut, decode_rows, encode_rows
from zero_plugin.errors import CheckpointError, DamagedError
from zero_plugin.tensors.modules import WEIGHT, Fragment
from zero_plugin.tensors.safetensors_files import Place

HEADER = b"header!!"
SIZE = 3 * PIECE_BYTES + 100


def refuse(byte: int, twice: bool) -> CheckpointError:
    return CheckpointError(f"{byte} {twice}")


def rows_of(data: bytes, *edges: int) -> list[tuple[int, int, int, int]]:
    """Return rows as processes write them whose byte ranges end at `edges`."""
    parts = itertools.pairwise((len(HEADER), *edges, len(data)))
    return [(0, start, end, checksum(data[start:end])) for part in parts for start, end in cut(*part)]


def decoded(rows: list[tuple[int, int, int, int]]) -> object:
    return decode_rows([encode_rows(rows[:2]), None, encode_rows(rows[2:])])


@pytest.fixture
def data() -> bytes:
    generator = np.random.default_rng(0)
    return HEADER + generator.bytes(SIZE - len(HEADER))


def test_pieces_are_cut_at_multiples() -> None:
    """Pieces are cut at multiples of the size in the file, so all writers of one piece agree on its bounds."""
    assert list(cut(5, 5)) == []
    assert list(cut(5, 2 * PIECE_BYTES + 1)) == [
        (5, PIECE_BYTES),
        (PIECE_BYTES, 2 * PIECE_BYTES),
        (2 * PIECE_BYTES, 2 * PIECE_BYTES + 1),
    ]


def test_what_is_missing_or_written_twice_is_named(data: bytes) -> None:
    """The first byte that is missing or written twice is named, in whatever order the processes' rows come."""
    rows = rows_of(data, 1000, PIECE_BYTES + 7)
    pieces = Pieces.of(HEADER, decoded(rows[::-1]), SIZE, refuse)
    assert pieces.ends[-1] == SIZE
    for index, (_, start, _, _) in enumerate(rows):
        with pytest.raises(CheckpointError, match=f"^{start} False$"):
            Pieces.of(HEADER, decoded(rows[:index] + rows[index + 1 :]), SIZE, refuse)
    with pytest.raises(CheckpointError, match=r"^1000 True$"):
        Pieces.of(HEADER, decoded([*rows, rows[1]]), SIZE, refuse)
    with pytest.raises(CheckpointError, match=r"^0 True$"):
        Pieces.of(HEADER, decoded([(0, 0, 8, 0), *rows]), SIZE, refuse)
    with pytest.raises(CheckpointError, match=f"^{SIZE} False$"):
        Pieces.of(HEADER, decoded(rows), SIZE + 1, refuse)
    with pytest.raises(DamagedError, match="not of pieces of this file"):
        Pieces.decode(pieces.encode(), SIZE + 1)
    with pytest.raises(DamagedError, match="not a table"):
        Pieces.decode(pieces.encode()[:, 0], SIZE)
    again = Pieces.decode(pieces.encode(), SIZE)
    assert (again.ends == pieces.ends).all()
    assert (again.sums == pieces.sums).all()


def test_pieces_that_cover_a_range(data: bytes) -> None:
    """Exactly the pieces that share a byte with a range cover the range."""
    pieces = Pieces.of(HEADER, decoded(rows_of(data, 1000)), SIZE, refuse)
    edges = [0, 8, 1000, PIECE_BYTES, 2 * PIECE_BYTES, 3 * PIECE_BYTES, SIZE]
    for start, end in itertools.combinations(sorted({*edges, 7, 9, 999, 1001, SIZE - 1}), 2):
        found = [(begin, stop) for begin, stop, _ in pieces.covering(start, end)]
        assert found == [pair for pair in itertools.pairwise(edges) if pair[0] < end and pair[1] > start]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_every_flipped_bit_of_what_is_read_is_found(data: bytes, dtype: torch.dtype, tmp_path: Path) -> None:
    """Every flipped bit in a range that is read is found, and damage in other processes' ranges is ignored."""
    pieces = {"file": Pieces.of(HEADER, decoded(rows_of(data, 1000, PIECE_BYTES + 8)), SIZE, refuse)}
    count = (SIZE - len(HEADER)) // dtype.itemsize
    place = Place("file", {torch.uint8: "U8", torch.float32: "F32"}[dtype], (count,), len(HEADER))
    draw = np.random.default_rng(1)
    for _ in range(200):
        first, last = sorted(draw.integers(0, count, 2).tolist())
        flipped = int(draw.integers(len(HEADER) * 8, SIZE * 8))
        changed = bytearray(data)
        changed[flipped // 8] ^= 1 << flipped % 8
        (tmp_path / "file").write_bytes(changed)
        begin, end = (len(HEADER) + index * dtype.itemsize for index in (first, last))
        read = [(start, stop) for start, stop, _ in pieces["file"].covering(begin, end)] if begin < end else []
        values = torch.empty(last - first, dtype=dtype)
        fragment = Fragment(WEIGHT, "w", (count,), first, values, (0, 0))
        with RangeReader(tmp_path, pieces=pieces) as reader:
            if any(start <= flipped // 8 < stop for start, stop in read):
                with pytest.raises(DamagedError, match="file is damaged: bytes"):
                    reader.read(place, fragment)
            else:
                reader.read(place, fragment)
                assert values.view(torch.uint8).numpy().tobytes() == data[begin:end]
