"""The manifest of a checkpoint: its contents, their places, sizes and checksums. It is written last."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import xxhash

from zero_plugin.errors import CheckpointError, DamagedError
from zero_plugin.tensors.safetensors_files import (
    TYPES,
    Place,
    parse_json,
    read_shape,
    refuse_outside,
    shorten,
    whole_number,
)

MANIFEST_NAME: Final = "manifest.json"
_FORMAT: Final = 2
_RANGES: Final = {"format": (1, _FORMAT), "processes": (1, 2**24), "order": (0, 2**53)}
_MOST_MODELS: Final = 1000
_LEAST_HEADER: Final = 8 + len("{}")  # bytes of the shortest header of a safetensors file
_MANIFEST_SUM: Final = re.compile(rb'\{"xxh3": "([0-9a-f]{16})", ')


@dataclass(slots=True)
class StoredModel:
    """One model's tensors in a checkpoint.

    Attributes:
        kind: name of the model's class.
        folder: its folder relative to the checkpoint's; empty for the first model.
        tied: name → the weight whose tensor it shares.
        places: (kind, name) → where the tensor is.
    """

    kind: str
    folder: str
    tied: Mapping[str, str]
    places: dict[tuple[str, str], Place]


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint's contents.

    Attributes:
        about: versions, time, and facts about the run.
        models: the models in the order of `prepare`.
        files: path relative to the folder → (bytes, checksum). The checksum is None for tensor files, which have one
            for each piece.
        is_verifiable: whether it has checksums that this version reads. Earlier versions wrote others.
    """

    about: Mapping[str, Any]
    models: Sequence[StoredModel]
    files: Mapping[str, tuple[int, int | None]]
    is_verifiable: bool = True

    def write(self, folder: Path) -> None:
        """Write the manifest into `folder`, after all other files. It begins with the checksum of its own rest."""
        encoded = {
            "format": _FORMAT,
            **self.about,
            "files": {path: {"size": size, "xxh3": found} for path, (size, found) in self.files.items()},
            "models": [_encode_model(model) for model in self.models],
        }
        rest = json.dumps(encoded)[1:].encode() + b"\n"  # ASCII: a file's name may be any bytes
        (folder / MANIFEST_NAME).write_bytes(b'{"xxh3": "%016x", ' % checksum(rest) + rest)

    def read(self, folder: Path, file: str) -> bytes:
        """Read a small file of the checkpoint in `folder`, and compare it with its checksum.

        Raises:
            DamagedError: the file differs, cannot be read, or is not listed in the manifest.
        """
        try:
            content = (folder / file).read_bytes()
        except OSError as error:
            raise DamagedError(f"{folder / file} cannot be read ({error.strerror}).") from error
        if self.is_verifiable and self.files.get(file, (0, None))[1] != checksum(content):
            raise DamagedError(f"{folder / file} is damaged: it differs from its checksum.")
        return content


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        CheckpointError: no manifest exists, or it cannot be read or is damaged.
    """
    file = folder / MANIFEST_NAME
    try:
        content = file.read_bytes()
        encoded = parse_json(content)
        version = encoded.pop("format")
        if whole_number(version) > _FORMAT:
            raise CheckpointError(f"{file} is of format {version}; this version reads up to {_FORMAT}.")
        found = _MANIFEST_SUM.match(content)
        own = found and checksum(memoryview(content)[found.end() :])
        # Only format 1 has no checksum of the manifest itself.
        if (version != 1 or "xxh3" in encoded) and (found is None or int(found[1], 16) != own):
            raise DamagedError(f"{file} is damaged: it differs from its checksum.")
        encoded.pop("xxh3", None)
        _refuse_impossible({"format": version, **encoded})
        files = {path: (whole_number(entry["size"]), entry.get("xxh3")) for path, entry in encoded.pop("files").items()}
        for path in files:
            refuse_outside(path)
        models = [_decode_model(model, files) for model in encoded.pop("models")]
        _refuse_other_bytes(models, files)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {MANIFEST_NAME}, so it is no complete checkpoint.") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}).") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{file} cannot be read ({type(error).__name__}: {error}).") from error
    return Manifest(encoded, models, files, version > 1)


def _refuse_impossible(encoded: Mapping[str, Any]) -> None:
    """Raise a ValueError for numbers that no run can have written into a manifest."""
    sums = {f"the checksum of {path}": entry.get("xxh3") for path, entry in encoded["files"].items()}
    for name, value in {**{name: encoded.get(name) for name in _RANGES}, **sums}.items():
        least, most = _RANGES.get(name, (0, 2**64 - 1))
        if value is not None and not least <= whole_number(value, 2**64) <= most:
            raise ValueError(f"{name} is {value}")
    if len(encoded["models"]) > _MOST_MODELS:
        raise ValueError(f"{len(encoded['models'])} models")


def _refuse_other_bytes(models: Sequence[StoredModel], files: Mapping[str, tuple[int, int | None]]) -> None:
    """Raise a ValueError if tensors share bytes, leave bytes out, or begin in a file's header.

    Tensors fill their file from its header to its end. Tied weights share one place.
    """
    used: dict[str, list[tuple[int, int]]] = {}
    for model in models:
        for place in model.places.values():
            if place.size:
                used.setdefault(place.file, []).append((place.start, place.start + place.size))
    for file, ranges in used.items():
        ranges.sort()
        neighbours = [*ranges, (files[file][0], 0)]
        for (_, end), (start, _) in itertools.pairwise(neighbours):
            if start != end:
                raise ValueError(f"tensors of {file} {'share' if start < end else 'leave out'} bytes")
        if ranges[0][0] < _LEAST_HEADER:
            raise ValueError(f"a tensor of {file} begins in its header")


def _encode_model(model: StoredModel) -> dict[str, Any]:
    tensors: dict[str, dict[str, Any]] = {}
    for (kind, name), place in model.places.items():
        tensors.setdefault(kind, {})[name] = {
            "file": place.file,
            "dtype": place.type_name,
            "shape": list(place.shape),
            "start": place.start,
        }
    return {"class": model.kind, "folder": model.folder, "tied": dict(model.tied), "tensors": tensors}


def _decode_model(encoded: Mapping[str, Any], files: Mapping[str, tuple[int, int | None]]) -> StoredModel:
    entries = {(kind, name): entry for kind, named in encoded["tensors"].items() for name, entry in named.items()}
    places = {
        key: Place(entry["file"], entry["dtype"], read_shape(entry["shape"]), whole_number(entry["start"]))
        for key, entry in entries.items()
    }
    for (kind, name), place in places.items():
        if place.type_name not in TYPES:
            raise ValueError(f"a tensor of type {shorten(place.type_name)}")
        size, own = files.get(place.file, (0, 0))
        if own is not None or place.start + place.size > size:  # a tensor file has only checksums of its pieces
            raise ValueError(f"{name} ({kind}) is not inside {place.file}")
    refuse_outside(encoded["folder"])
    return StoredModel(str(encoded["class"]), encoded["folder"], dict(encoded["tied"]), places)


def checksum(data: Any) -> int:
    """Return the xxh3 checksum of bytes or any object with a buffer, from 0 to 2⁶⁴ - 1.

    It detects damage by a disk, a network or a program. It does not detect deliberate changes, since anyone can
    compute it.
    """
    return int(xxhash.xxh3_64_intdigest(data))


def checksum_of_file(path: Path) -> int:
    """Return the checksum of a file. Read the file in pieces, to limit memory."""
    found = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            found.update(chunk)
    return int(found.intdigest())
