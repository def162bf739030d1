"""Which file holds which tensor, and where; and the tensors of a session as fragments.

The layout is the same on every process, because it is computed from the tensors' descriptions. A session's fragments
are written, read into, or only described.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import torch

from zero_plugin.errors import CheckpointError
from zero_plugin.strategies.base import Session
from zero_plugin.strategies.optimizer_states import OptimizedPiece, state_fragments
from zero_plugin.tensors.fragments import MASTER, WEIGHT, Fragment, with_masters
from zero_plugin.tensors.model_folder import INDEX_NAME, SINGLE_NAME, Place
from zero_plugin.tensors.safetensors_file import DTYPE_NAMES, encode_header, sort_key

_SHARD_NAME: Final = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")

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
        places: (kind, name) → place.
        headers: file → its first bytes.
        sizes: file → bytes.
        index: path and text of the weights' index file; None where one file holds all.
    """

    places: dict[tuple[str, str], Place] = field(default_factory=dict)
    headers: dict[str, bytes] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    index: tuple[str, str] | None = None


def describe(fragments: Iterable[Fragment]) -> list[Description]:
    """The unpartitioned tensors that `fragments` are pieces of, each once."""
    found = {(f.kind, f.name): Description(f.kind, f.name, f.values.dtype, f.shape) for f in fragments}
    for description in found.values():
        if description.dtype not in DTYPE_NAMES:
            raise CheckpointError(
                f"{description.name} ({description.kind}) is {description.dtype}, which safetensors files cannot hold."
            )
    return list(found.values())


def plan_layout(
    descriptions: Sequence[Description],
    folder: str,
    *,
    max_shard_bytes: int,
    tied: Mapping[str, str],
    notes: Mapping[str, str] = MappingProxyType({}),
) -> Layout:
    """Places for one model's tensors.

    Weights are a Hugging Face model folder: `model.safetensors`, or numbered shards with an index. The fp32 master
    weights and each optimizer state are one file in `optimizer/`, with the parameters' names for its tensors.

    Args:
        descriptions: the same on every process.
        folder: of the model below the checkpoint's, with a slash at its end, or empty.
        max_shard_bytes: of a weight file; a larger tensor has one to itself.
        tied: name → the weight whose tensor it shares, kept in the files' metadata.
        notes: further metadata of the weight files.
    """
    layout = Layout()
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
        file = "masters" if kind == MASTER else kind
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
    ordered = sorted(tensors, key=lambda tensor: sort_key(tensor.name, tensor.dtype))
    header, ranges = encode_header(((t.name, t.dtype, t.shape) for t in ordered), metadata)
    layout.headers[file] = header
    layout.sizes[file] = max((end for _, end in ranges.values()), default=len(header))
    for tensor in tensors:
        place = Place(file, DTYPE_NAMES[tensor.dtype], tensor.shape, ranges[tensor.name][0])
        layout.places[tensor.kind, tensor.name] = place


def session_fragments(
    session: Session, *, changing: bool = False, prepare: Callable[[list[OptimizedPiece]], None] = lambda _: None
) -> Iterator[Fragment]:
    """All tensors of a session, as they are here; each may be used until the next is taken.

    Args:
        session: of a model.
        changing: they are going to be changed, inside `session.reading()`.
        prepare: called with pieces that are in memory, before their fragments come.
    """
    weights = {fragment.name: fragment for fragment in session.weight_fragments()}
    for pieces in session.blocks(changing=changing):
        prepare(pieces)
        yield from _join(weights, pieces)
    yield from session.fetched(weights.values(), changing=changing)


def described_fragments(session: Session) -> Iterator[Fragment]:
    """The same, without reading from a disk: of what is there, all but the values is known."""
    weights = {fragment.name: fragment for fragment in session.weight_fragments()}
    yield from _join(weights, session.optimized_pieces())
    yield from weights.values()


def placed_fragments(fragments: Iterable[Fragment], layout: Layout) -> Iterator[Fragment]:
    """Those that have a place: all but the weights of a model that a hook has stored.

    Raises:
        CheckpointError: nobody planned for one.
    """
    for fragment in fragments:
        if (fragment.kind, fragment.name) in layout.places:
            yield fragment
        elif fragment.kind != WEIGHT:
            raise CheckpointError(f"{fragment.name} ({fragment.kind}) has no place in the checkpoint. {ASK_TO_REPORT}")


def _join(weights: dict[str, Fragment], pieces: list[OptimizedPiece]) -> Iterator[Fragment]:
    """What there is of the parameters that `pieces` are of, whose weights are taken out of `weights`."""
    trained = [weights.pop(piece.name) for piece in pieces if piece.name in weights]
    yield from with_masters(trained, (piece.weight() for piece in pieces))
    yield from state_fragments(pieces)
