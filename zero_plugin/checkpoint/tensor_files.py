"""The tensor files of a checkpoint or a model folder: which file holds which tensor, and where.

Every process writes and reads just the ranges of them that it owns or needs. The layout is the same on every process,
because it is computed from the tensors' descriptions. The checksum is one that processes can compute in pieces, in any
order, and add up.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeVar

import numpy as np
import torch
from torch import Tensor

from zero_plugin.checkpoint.folders import reserve, start_writing
from zero_plugin.errors import CheckpointError
from zero_plugin.strategies.base import Session
from zero_plugin.strategies.optimizer_states import OptimizedPiece, state_fragments
from zero_plugin.tensors.modules import MASTER_WEIGHT, WEIGHT, Fragment, with_master_weights
from zero_plugin.tensors.safetensors_files import INDEX_NAME, SINGLE_NAME, TYPE_NAMES, Place, encode_header

_SHARD_NAME: Final = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_STAGING_BYTES: Final = 2**25  # what is on a GPU, of another dtype or not contiguous passes through so much CPU memory
_WORD: Final = 8  # bytes
_PLACES: Final = np.arange(2**17, dtype=np.uint64)  # of words in a chunk of 1 MiB, which stays in the cache

_Opened = TypeVar("_Opened", bound="_Files")

ASK_TO_REPORT: Final = "This is a bug in zero_plugin; please report it with the configuration."


@dataclass(frozen=True, slots=True)
class Description:
    """One unpartitioned tensor: kind and name as in `Fragment`."""

    kind: str
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(slots=True)
class Layout:
    """The tensor files of one model.

    Attributes:
        model_class: its name.
        folder: below the checkpoint's, with a slash at its end, or empty.
        tied: name → the weight whose tensor it shares.
        places: (kind, name) → place.
        headers: file → its first bytes.
        sizes: file → bytes.
        index: path and text of the weights' index file; None where one file holds all.
    """

    model_class: str
    folder: str
    tied: Mapping[str, str]
    places: dict[tuple[str, str], Place] = field(default_factory=dict)
    headers: dict[str, bytes] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    index: tuple[str, str] | None = None


def describe(fragments: Iterable[Fragment]) -> list[Description]:
    """The unpartitioned tensors that `fragments` are pieces of, each once."""
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
    """Places for one model's tensors.

    Weights are a Hugging Face model folder: `model.safetensors`, or numbered shards with an index. The fp32 master
    weights and each optimizer state are one file in `optimizer/`, with the parameters' names for its tensors.

    Args:
        descriptions: the same on every process.
        max_shard_bytes: of a weight file; a larger tensor has one to itself.
        tied: see `Layout`; kept in the files' metadata too.
        folder: see `Layout`.
        model_class: see `Layout`.
        notes: further metadata of the weight files.
    """
    layout = Layout(model_class, folder, tied)
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
    """Whether a file of this name is one of a model folder's weight files, or their index."""
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
    header, ranges = encode_header(((t.name, t.dtype, t.shape) for t in tensors), metadata)
    layout.headers[file] = header
    layout.sizes[file] = max((end for _, end in ranges.values()), default=len(header))
    for tensor in tensors:
        place = Place(file, TYPE_NAMES[str(tensor.dtype)], tensor.shape, ranges[tensor.name][0])
        layout.places[tensor.kind, tensor.name] = place


def session_fragments(
    session: Session, *, changing: bool = False, prepare: Callable[[list[OptimizedPiece]], None] = lambda _: None
) -> Iterator[Fragment]:
    """All tensors of a session, as they are here; each may be used until the next is taken.

    Args:
        session: of a model.
        changing: whether they are going to be changed, inside `session.loading()`.
        prepare: called with pieces that are in memory, before their fragments come.
    """
    weights = {fragment.name: fragment for fragment in session.weight_fragments()}
    for pieces in session.blocks(changing=changing):
        prepare(pieces)
        yield from _join(weights, pieces)
    yield from session.fetched(weights.values(), changing=changing)


def described_fragments(session: Session) -> Iterator[Fragment]:
    """The same fragments without reading from disk: all but the values of swapped tensors is known."""
    weights = {fragment.name: fragment for fragment in session.weight_fragments()}
    yield from _join(weights, session.optimized_pieces())
    yield from weights.values()


def placed_fragments(fragments: Iterable[Fragment], layout: Layout) -> Iterator[Fragment]:
    """The fragments that have a place in the layout: all but the weights that a hook has stored itself.

    Raises:
        CheckpointError: a tensor other than a weight has no place.
    """
    for fragment in fragments:
        if (fragment.kind, fragment.name) in layout.places:
            yield fragment
        elif fragment.kind != WEIGHT:
            raise CheckpointError(f"{fragment.name} ({fragment.kind}) has no place in the checkpoint. {ASK_TO_REPORT}")


def _join(weights: dict[str, Fragment], pieces: list[OptimizedPiece]) -> Iterator[Fragment]:
    """What there is of the parameters that `pieces` are of, whose weights are taken out of `weights`."""
    trained = [weights.pop(piece.name) for piece in pieces if piece.name in weights]
    yield from with_master_weights(trained, (piece.weight() for piece in pieces))
    yield from state_fragments(pieces)


def create_files(draft: Path, layouts: Sequence[Layout]) -> None:
    """Make the tensor files in `draft`, at full size, for `write_fragments`; and the weights' index."""
    for layout in layouts:
        for file, header in layout.headers.items():
            path = draft / file
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as opened:
                # The size first: a client of NFS that writes at a file's end takes the rest of that page to be zeros,
                # and may write them over what another machine has written there.
                reserve(opened, layout.sizes[file])
                opened.write(header)
        if layout.index is not None:
            name, text = layout.index
            (draft / name).write_text(text, encoding="utf-8")


def write_fragments(
    draft: Path,
    parts: Iterable[tuple[Iterable[Fragment], Layout]],
    progress: Callable[[int], None],
    *,
    summed: bool = True,
) -> list[Tensor]:
    """Write what of some models' fragments is this process' to write; the disk has it at the return.

    Args:
        draft: the folder, with the tensor files.
        parts: of each model, its fragments and their layout.
        progress: called with the bytes written since its last call.
        summed: whether checksums are computed; else they are zeros.

    Returns:
        For each model one row for each of its places: the two sums (`sum_words`) and the number of elements of what was
        written.
    """
    written = []
    with RangeWriter(draft, progress) as writer:
        for fragments, layout in parts:
            rows = {key: row for row, key in enumerate(layout.places)}
            table = torch.zeros(len(rows), 3, dtype=torch.int64)
            for fragment in placed_fragments(fragments, layout):
                key = fragment.kind, fragment.name
                table[rows[key], :2] += writer.write(fragment, layout.places[key], summed=summed)
                table[rows[key], 2] += fragment.written[1] - fragment.written[0]
            written.append(table)
        writer.sync()
    return written


def refuse_gaps(layout: Layout, written: Tensor) -> None:
    """Refuse a draft in which not every element of every tensor was written once.

    Args:
        layout: of the tensors.
        written: int64, one for each of its places: how many elements all processes wrote.

    Raises:
        CheckpointError: it names the tensor.
    """
    for ((kind, name), place), count in zip(layout.places.items(), written.tolist(), strict=True):
        if count != math.prod(place.shape):
            raise CheckpointError(
                f"{count:,} elements of {name} ({kind}) were written, and it has {math.prod(place.shape):,}. "
                f"{ASK_TO_REPORT}"
            )


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
    """The files below a folder, each opened once, inside `with`.

    Args:
        folder: the folder.
        progress: called with the bytes that were read or written since its last call.
    """

    _flags = os.O_RDONLY

    def __init__(self, folder: Path, progress: Callable[[int], None] = lambda _: None) -> None:
        self.folder = folder
        self._progress = progress
        self.open: dict[str, int] = {}

    def __enter__(self: _Opened) -> _Opened:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self.open.values():
            os.close(descriptor)

    def descriptor(self, file: str) -> int:
        if file not in self.open:
            try:
                self.open[file] = os.open(self.folder / file, self._flags)
            except FileNotFoundError:
                raise CheckpointError(
                    f"The main process can see {self.folder / file}, but this process cannot. Checkpoints need a file "
                    "system that all machines share."
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


class RangeWriter(_Files):
    """Writes into files that exist at full size."""

    _flags = os.O_WRONLY

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
            self._progress(chunk.nbytes)
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

    def sums(self, place: Place) -> tuple[int, ...]:
        """The checksum of a stored tensor."""
        total = torch.zeros(2, dtype=torch.int64)
        count = math.prod(place.shape)
        staging = torch.empty(min(max(count, 1), _STAGING_BYTES // place.dtype.itemsize), dtype=place.dtype)
        for first in range(0, count, staging.numel()):
            chunk = staging[: count - first]
            self._fill(place, first, chunk)
            total += sum_words(chunk, first)
        return tuple(total.tolist())

    def _fill(self, place: Place, first: int, flat: Tensor) -> None:
        data, offset = _bytes_of(flat), place.start + first * flat.element_size()
        while data.nbytes:
            read = os.preadv(self.descriptor(place.file), [data], offset)
            if read == 0:
                raise CheckpointError(f"{self.folder / place.file} ends before byte {offset + data.nbytes}.")
            data, offset = data[read:], offset + read
            self._progress(read)


def _bytes_of(flat: Tensor) -> memoryview:
    return flat.view(torch.uint8).numpy().data


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data.nbytes:
        written = os.pwrite(descriptor, data, offset)  # Linux writes 2 GiB at most
        data, offset = data[written:], offset + written
