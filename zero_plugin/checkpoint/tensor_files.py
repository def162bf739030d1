"""The tensor files of a checkpoint or a model folder: which file holds which tensor, and where.

Every process writes only the ranges that it owns, reads only the ranges that it needs, and verifies the bytes that it
reads. The layout is the same on every process, because it is computed from the tensors' descriptions.

A file consists of pieces, each with its checksum. It is cut at the ends of the written ranges, and at multiples of a
fixed size. So a process can verify exactly the bytes that it uses, and reads no byte twice.
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from zero_plugin.checkpoint.disk import reserve, start_writing
from zero_plugin.checkpoint.manifest import StoredModel, checksum
from zero_plugin.errors import CheckpointError, DamagedError
from zero_plugin.strategies.base import Session
from zero_plugin.strategies.optimizer_states import OptimizedPiece, state_fragments
from zero_plugin.tensors.modules import MASTER_WEIGHT, WEIGHT, Fragment, with_master_weights
from zero_plugin.tensors.safetensors_files import INDEX_NAME, SINGLE_NAME, TYPE_NAMES, Place, encode_header

_SHARD_NAME: Final = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_STAGING_BYTES: Final = 2**25  # CPU buffer for tensors on a GPU, of another dtype or not contiguous

CHECKSUMS: Final = "checksums"  # name, without suffix, of the file with the pieces of all tensor files
ASK_TO_REPORT: Final = "This is a bug in zero_plugin; please report it with the configuration."

# The largest piece. A process that needs a part of a piece reads all of it. Each piece takes 16 bytes in CHECKSUMS.
PIECE_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True)
class Description:
    """The description of one unpartitioned tensor. Kind and name are as in `Fragment`."""

    kind: str
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The tensor's size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(slots=True)
class Layout(StoredModel):
    """One model's tensors and their planned files.

    Attributes:
        headers: file → its first bytes.
        sizes: file → bytes.
        index: path and text of the weights' index file; None if one file holds all weights.
    """

    headers: dict[str, bytes] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    index: tuple[str, str] | None = None


def describe(fragments: Iterable[Fragment]) -> list[Description]:
    """Describe the unpartitioned tensors that `fragments` belong to, each once.

    Raises:
        CheckpointError: safetensors files cannot hold a tensor's dtype.
    """
    found = {(f.kind, f.name): Description(f.kind, f.name, f.values.dtype, f.shape) for f in fragments}
    for description in found.values():
        if str(description.dtype) not in TYPE_NAMES:
            raise CheckpointError(
                f"{description.name} ({description.kind}) is {description.dtype}, which safetensors files cannot hold."
            )
    return list(found.values())


def plan_layout(
    descriptions: Sequence[Description],
    *,
    max_shard_bytes: int,
    tied: Mapping[str, str],
    folder: str = "",
    model_class: str = "",
    notes: Mapping[str, str] = MappingProxyType({}),
) -> Layout:
    """Plan the files and positions of one model's tensors.

    Weights form a Hugging Face model folder: `model.safetensors`, or numbered shards with an index. The fp32 master
    weights and each optimizer state have one file in `optimizer/`, in which a tensor has its parameter's name.

    Args:
        descriptions: the tensors; the same on every process.
        max_shard_bytes: the largest size of a weight file; a larger tensor gets a file of its own.
        tied: see `Layout`; also written into the files' metadata.
        folder: see `Layout`; empty, or ends with a slash.
        model_class: name of the model's class.
        notes: further metadata of the weight files.
    """
    layout = Layout(model_class, folder, tied, {})
    shards = _cut_into_shards([d for d in descriptions if d.kind == WEIGHT], max_shard_bytes)
    total = len(shards)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = SINGLE_NAME if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"
        names = {description.name for description in shard}
        aliases = {alias: kept for alias, kept in tied.items() if kept in names}
        _add_file(layout, folder + file, shard, {**aliases, **notes, "format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if total > 1:
        size = sum(description.size for shard in shards for description in shard)
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        layout.index = folder + INDEX_NAME, json.dumps(index, indent=2)
    for kind in sorted({description.kind for description in descriptions} - {WEIGHT}):
        file = "masters" if kind == MASTER_WEIGHT else kind
        _add_file(layout, f"{folder}optimizer/{file}.safetensors", [d for d in descriptions if d.kind == kind], {})
    return layout


def is_weight_file(name: str) -> bool:
    """Return whether a name is that of a model folder's weight file or their index."""
    return name in (SINGLE_NAME, INDEX_NAME) or _SHARD_NAME.fullmatch(name) is not None


def _cut_into_shards(weights: Sequence[Description], limit: int) -> list[list[Description]]:
    shards: list[list[Description]] = []
    filled = 0
    for weight in weights:
        if not shards or filled + weight.size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(weight)
        filled += weight.size
    return shards


def _add_file(layout: Layout, file: str, tensors: Sequence[Description], metadata: Mapping[str, str]) -> None:
    header, ranges = encode_header([(t.name, t.dtype, t.shape) for t in tensors], metadata)
    layout.headers[file] = header
    layout.sizes[file] = max([len(header), *[end for _, end in ranges.values()]])
    for tensor in tensors:
        place = Place(file, TYPE_NAMES[str(tensor.dtype)], tensor.shape, ranges[tensor.name][0])
        layout.places[tensor.kind, tensor.name] = place


Row = tuple[int, int, int, int]  # number of a file, first byte, end, checksum


def cut(start: int, end: int) -> list[tuple[int, int]]:
    """Cut a range of a file into pieces at the multiples of `PIECE_BYTES`."""
    inner = range(start - start % PIECE_BYTES + PIECE_BYTES, end, PIECE_BYTES)
    return list(pairwise([start, *inner, end])) if start < end else []


def encode_rows(rows: Sequence[Row]) -> str:
    """Encode the rows of a process as a text, which can be sent to the others."""
    return base64.b64encode(np.array(rows, np.uint64).tobytes()).decode("ascii")


def decode_rows(texts: Iterable[str | None]) -> Any:
    """Decode the texts of `encode_rows` of all processes into rows, uint64 of shape (rows, 4)."""
    data = b"".join(base64.b64decode(text or "") for text in texts)
    return np.frombuffer(data, np.uint64).reshape(-1, 4)


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of one file. Each piece begins at the end of the previous piece.

    Attributes:
        ends: ends of the pieces, int64, ascending.
        sums: their checksums, uint64.
    """

    ends: Any
    sums: Any

    @classmethod
    def of(cls, header: bytes, rows: Any, size: int, refuse: Callable[[int, bool], CheckpointError]) -> Pieces:
        """Join the written pieces of a file. Check that every byte was written exactly once.

        Args:
            header: the file's first bytes.
            rows: the rows of all processes, uint64 of shape (rows, 4), in any order.
            size: the file's size.
            refuse: returns the error for a byte that was written by no process (False) or more than once (True).

        Raises:
            CheckpointError: the error of `refuse`.
        """
        rows = rows[np.argsort(rows[:, 1], kind="stable")]
        first = cut(0, len(header))
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
        """Decode the table of `encode`, int64 of shape (pieces, 2).

        Raises:
            DamagedError: the table does not describe pieces of a file of `size` bytes.
        """
        if table.dtype != np.int64 or table.ndim != 2 or table.shape[1] != 2:
            raise DamagedError("the checksums are not a table of pieces")
        ends = np.ascontiguousarray(table[:, 0])
        if bool((np.diff(ends, prepend=0) <= 0).any()) or (ends[-1] if ends.size else 0) != size:
            raise DamagedError("the checksums are not of pieces of this file")
        return cls(ends, np.ascontiguousarray(table[:, 1]).view(np.uint64))

    def encode(self) -> Any:
        """Encode end and checksum of each piece, as int64 of shape (pieces, 2)."""
        return np.stack([self.ends, self.sums.view(np.int64)], axis=1)

    def covering(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield first byte, end and checksum of each piece that overlaps the bytes from `start` to `end`."""
        first, last = np.searchsorted(self.ends, [start, end], side="right").tolist()
        last = min(last + 1, len(self.ends))
        before = int(self.ends[first - 1]) if first else 0
        for stop, found in zip(self.ends[first:last].tolist(), self.sums[first:last].tolist(), strict=True):
            if before >= end:
                return
            yield before, stop, found
            before = stop


def session_fragments(
    session: Session, *, changing: bool = False, prepare: Callable[[list[OptimizedPiece]], None] = lambda _: None
) -> Iterator[Fragment]:
    """Yield this process's fragments of all tensors of a session. Each may be used until the next one is taken.

    Args:
        session: the model's session.
        changing: whether the caller changes the fragments, inside `session.loading()`.
        prepare: called with pieces in memory, before their fragments are yielded.
    """
    weights = {fragment.name: fragment for fragment in session.weight_fragments()}
    for pieces in session.blocks(changing=changing):
        prepare(pieces)
        yield from _join(weights, pieces)
    yield from session.fetched(weights.values(), changing=changing)


def described_fragments(session: Session) -> Iterator[Fragment]:
    """Return the fragments of `session_fragments` without reading from disk. Swapped tensors have no values."""
    weights = {fragment.name: fragment for fragment in session.weight_fragments()}
    return chain(_join(weights, session.optimized_pieces()), weights.values())


def placed_fragments(fragments: Iterable[Fragment], layout: Layout) -> Iterator[Fragment]:
    """Yield the fragments that have a place in the layout. Skip weights that a hook of the script has stored itself.

    Raises:
        CheckpointError: a tensor other than a weight has no place.
    """
    for fragment in fragments:
        if (fragment.kind, fragment.name) in layout.places:
            yield fragment
        elif fragment.kind != WEIGHT:
            raise CheckpointError(f"{fragment.name} ({fragment.kind}) has no place in the checkpoint. {ASK_TO_REPORT}")


def _join(weights: dict[str, Fragment], pieces: list[OptimizedPiece]) -> Iterator[Fragment]:
    """Yield weights, master weights and states of the parameters of `pieces`. Remove their weights from `weights`."""
    trained = [weights.pop(piece.name) for piece in pieces if piece.name in weights]
    return chain(with_master_weights(trained, [piece.weight() for piece in pieces]), state_fragments(pieces))


def create_files(draft: Path, layouts: Sequence[Layout]) -> None:
    """Create the tensor files in `draft` at full size, for `write_fragments`, and the weights' index."""
    for layout in layouts:
        for file, header in layout.headers.items():
            path = draft / file
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with path.open("wb") as opened:
                    # Set the size first. An NFS client that writes at a file's end assumes zeros in the rest of the
                    # page, and may overwrite what another machine has written there.
                    reserve(opened, layout.sizes[file])
                    opened.write(header)
            except OSError as error:
                error.filename = str(path)  # errors of writing and truncating name no file
                raise
        if layout.index is not None:
            name, text = layout.index
            (draft / name).write_text(text, encoding="utf-8")


def write_fragments(
    draft: Path,
    parts: Iterable[tuple[Iterable[Fragment], Layout]],
    progress: Callable[[int], None],
) -> str:
    """Write this process's part of the models' fragments. The data is on the disk when the function returns.

    Args:
        draft: the folder with the tensor files.
        parts: for each model, its fragments and their layout.
        progress: called with the bytes written since its last call.

    Returns:
        The written pieces, as a text for `complete_pieces`.
    """
    number: dict[str, int] = {}
    with RangeWriter(draft, progress) as writer:
        for fragments, layout in parts:
            number.update((file, len(number)) for file in layout.headers)
            for fragment in placed_fragments(fragments, layout):
                writer.write(fragment, layout.places[fragment.kind, fragment.name])
        writer.sync()
    return encode_rows([(number[file], start, end, own) for file, start, end, own in writer.written])


def complete_pieces(layouts: Iterable[Layout], written: Iterable[str | None]) -> dict[str, Pieces]:
    """Return the pieces of each tensor file of a draft. Check that every byte was written exactly once.

    Args:
        layouts: the layouts of all models.
        written: the text of `write_fragments` of each process.

    Raises:
        CheckpointError: a part of a tensor is missing or was written twice. The message names the tensor.
    """
    found: dict[str, Pieces] = {}
    rows = decode_rows(written)
    for layout in layouts:
        for file, header in layout.headers.items():
            own = rows[rows[:, 0] == len(found)]
            found[file] = Pieces.of(header, own, layout.sizes[file], partial(_refuse_part, layout, file))
    return found


def _refuse_part(layout: Layout, file: str, byte: int, twice: bool) -> CheckpointError:
    of = tensor_at(layout.places, file, byte)
    times = "more than once" if twice else "by no process"
    return CheckpointError(f"byte {byte:,} of {file}, of {of}, was written {times}. {ASK_TO_REPORT}")


def tensor_at(places: Mapping[tuple[str, str], Place], file: str, byte: int) -> str:
    """Return name and kind of the tensor with a given byte of a file; `the header` if no tensor has it."""
    for (kind, name), place in places.items():
        if place.file == file and place.start <= byte < place.start + place.size:
            return f"{name} ({kind})"
    return "the header"


class _Files(ExitStack):
    """Files below a folder. Each file is opened once and closed at the end of `with`.

    Args:
        folder: the folder.
        progress: called with the bytes that were read or written since its last call.
    """

    _flags = os.O_RDONLY

    def __init__(self, folder: Path, progress: Callable[[int], None] = lambda _: None) -> None:
        super().__init__()
        self.folder = folder
        self._progress = progress
        self.open: dict[str, int] = {}

    def descriptor(self, file: str) -> int:
        if file not in self.open:
            try:
                self.open[file] = os.open(self.folder / file, self._flags)
            except FileNotFoundError:
                raise DamagedError(
                    f"{self.folder / file} exists for the main process, but not for this process.\n"
                    "Make sure that nothing removes a checkpoint while it is written or read. It needs a file system "
                    "that all machines share."
                ) from None
            self.callback(os.close, self.open[file])
        return self.open[file]


class RangeWriter(_Files):
    """A writer into files that exist at full size.

    Attributes:
        written: file, first byte, end and checksum of each written piece.
    """

    _flags = os.O_WRONLY

    def __init__(self, folder: Path, progress: Callable[[int], None] = lambda _: None) -> None:
        super().__init__(folder, progress)
        self.written: list[tuple[str, int, int, int]] = []

    def write(self, fragment: Fragment, place: Place) -> None:
        """Write this process's part of a fragment, in the dtype of `place`.

        Args:
            fragment: the fragment; its values are in memory, on any device and of any dtype.
            place: the place of the unpartitioned tensor.

        Raises:
            CheckpointError: the values are not in memory.
        """
        flat, dtype = fragment.part_to_write(), place.dtype
        step = _STAGING_BYTES // max(flat.element_size(), dtype.itemsize)
        for offset in range(0, flat.numel(), step):
            chunk = flat[offset : offset + step].to("cpu", dtype).contiguous()
            first = fragment.start + fragment.written[0] + offset
            data, position = _bytes_of(chunk), place.start + first * chunk.element_size()
            for start, end in cut(position, position + chunk.nbytes):
                self.written.append((place.file, start, end, checksum(data[start - position : end - position])))
            self._write(place.file, data, position)
            self._progress(chunk.nbytes)

    def sync(self) -> None:
        """Wait until the disk has everything that this process wrote."""
        for file, descriptor in self.open.items():
            self._named(file, os.fsync, descriptor)

    def _write(self, file: str, data: memoryview, offset: int) -> None:
        descriptor, start = self.descriptor(file), offset
        while offset < start + data.nbytes:  # Linux writes at most 2 GiB per call
            offset += self._named(file, os.pwrite, descriptor, data[offset - start :], offset)
        start_writing(descriptor, start, data.nbytes)

    def _named(self, file: str, call: Callable[..., Any], *arguments: object) -> Any:
        """Make a system call. If it fails, the error names the file."""
        try:
            return call(*arguments)
        except OSError as error:
            error.filename = str(self.folder / file)
            raise


class RangeReader(_Files):
    """A reader of files that verifies what it reads.

    Args:
        folder: the folder.
        progress: called with the bytes that were read since its last call.
        pieces: the pieces of each file, with which every used byte is verified; None to skip verification.
    """

    def __init__(
        self,
        folder: Path,
        progress: Callable[[int], None] = lambda _: None,
        pieces: Mapping[str, Pieces] | None = None,
    ) -> None:
        super().__init__(folder, progress)
        self._pieces = pieces
        self._edge: tuple[tuple[str, int], memoryview] | None = None  # the last piece that was needed only in part

    def read(self, place: Place, fragment: Fragment) -> None:
        """Fill a fragment from the unpartitioned tensor at `place`, which has the same shape and any dtype."""
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

    def damaged_pieces(self, file: str, pieces: Pieces, end: int) -> Iterator[int]:
        """Yield the first byte of each damaged piece of a file, from its beginning to `end`."""
        staging = memoryview(bytearray(PIECE_BYTES))
        for start, stop, expected in pieces.covering(0, end):
            piece = staging[: stop - start]
            self._read(file, piece, start)
            if checksum(piece) != expected:
                yield start

    def _fill(self, place: Place, first: int, flat: Tensor) -> None:
        data, offset = _bytes_of(flat), place.start + first * flat.element_size()
        if self._pieces is None:
            self._read(place.file, data, offset)
            return
        for start, end, expected in self._pieces[place.file].covering(offset, offset + data.nbytes):
            wanted = data[max(start - offset, 0) : end - offset]
            if wanted.nbytes == end - start:
                self._read_verified(place.file, wanted, start, expected)
                continue
            if self._edge is None or self._edge[0] != (place.file, start):
                piece = memoryview(bytearray(end - start))
                self._read_verified(place.file, piece, start, expected)
                self._edge = (place.file, start), piece
            inside = max(offset - start, 0)
            wanted[:] = self._edge[1][inside : inside + wanted.nbytes]

    def _read_verified(self, file: str, data: memoryview, offset: int, expected: int) -> None:
        self._read(file, data, offset)
        if checksum(data) != expected:
            raise DamagedError(
                f"{self.folder / file} is damaged: bytes {offset:,} to {offset + data.nbytes:,} differ from their "
                "checksum."
            )

    def _read(self, file: str, data: memoryview, offset: int) -> None:
        while data.nbytes:
            try:
                read = os.preadv(self.descriptor(file), [data], offset)
            except OSError as error:  # such as a failing disk
                raise DamagedError(f"{self.folder / file} cannot be read ({error.strerror}).") from error
            if read == 0:
                raise DamagedError(f"{self.folder / file} ends before byte {offset + data.nbytes:,}.")
            data, offset = data[read:], offset + read
            self._progress(read)


def _bytes_of(flat: Tensor) -> memoryview:
    return flat.view(torch.uint8).numpy().data
