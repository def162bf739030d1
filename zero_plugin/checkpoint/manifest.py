"""The manifest of a checkpoint: what it holds, where, and how to tell that it is whole. Its last file to be written."""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from zero_plugin.checkpoint.durable import write_text
from zero_plugin.checkpoint.place import ITEM_BYTES, Place
from zero_plugin.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "MANIFEST_NAME",
    "Manifest",
    "StoredModel",
    "checksum_of_file",
    "find_damage",
    "find_wrong_files",
    "list_files",
    "read_manifest",
]

MANIFEST_NAME: Final = "manifest.json"
_FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class StoredModel:
    """One model's tensors in a checkpoint.

    Attributes:
        kind: name of its class.
        folder: below the checkpoint's, empty for the first model.
        tied: name → the weight whose tensor it shares.
        places: (kind, name) → where the tensor is.
        sums: (kind, name) → its two checksums, see `sum_words`.
    """

    kind: str
    folder: str
    tied: Mapping[str, str]
    places: Mapping[tuple[str, str], Place]
    sums: Mapping[tuple[str, str], tuple[int, int]]

    @staticmethod
    def with_sums(
        kind: str, folder: str, tied: Mapping[str, str], places: Mapping[tuple[str, str], Place], sums: Tensor
    ) -> StoredModel:
        """From one row of two sums for each place."""
        pairs = {key: (first, second) for key, (first, second) in zip(places, sums.tolist(), strict=True)}
        return StoredModel(kind, folder, tied, places, pairs)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint's contents.

    Attributes:
        about: versions, time, and what wrote it.
        models: in the order of `prepare`.
        files: path below the folder → (bytes, checksum; None where the tensors have theirs).
    """

    about: Mapping[str, Any]
    models: Sequence[StoredModel]
    files: Mapping[str, tuple[int, int | None]]

    def write(self, folder: Path) -> None:
        """Write it into `folder`; all other files have to be on the disk."""
        encoded = {
            "format": _FORMAT,
            **self.about,
            "files": {path: {"size": size, "crc32": crc} for path, (size, crc) in self.files.items()},
            "models": [_encode_model(model) for model in self.models],
        }
        write_text(folder / MANIFEST_NAME, json.dumps(encoded, ensure_ascii=False) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    file = folder / MANIFEST_NAME
    try:
        encoded = json.loads(file.read_text(encoding="utf-8"))
        if encoded["format"] > _FORMAT:
            raise CheckpointError(f"{file} is of format {encoded['format']}; this version reads up to {_FORMAT}.")
        files = {path: (entry["size"], entry["crc32"]) for path, entry in encoded.pop("files").items()}
        models = [_decode_model(model) for model in encoded.pop("models")]
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {MANIFEST_NAME}, so it is no complete checkpoint.") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} cannot be read ({type(error).__name__}: {error}).") from error
    return Manifest(encoded, models, files)


def find_damage(folder: Path) -> str | None:
    """What makes a checkpoint incomplete, by names and sizes alone; None if nothing does."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return str(error)
    return next(iter(find_wrong_files(folder, manifest).values()), None)


def find_wrong_files(folder: Path, manifest: Manifest) -> dict[str, str]:
    """The files that are missing, or of another size, each with a sentence; nothing of them is read."""
    found = {path: _wrong_size(folder / path, size) for path, (size, _) in manifest.files.items()}
    return {path: problem for path, problem in found.items() if problem is not None}


def list_files(folder: Path, tensor_files: Collection[str]) -> dict[str, tuple[int, int | None]]:
    """All files below `folder`, as the manifest has them.

    Args:
        folder: of a checkpoint that is complete but for its manifest.
        tensor_files: those whose tensors have checksums of their own.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    named = {str(path.relative_to(folder)): path for path in paths}
    return {
        name: (path.stat().st_size, None if name in tensor_files else checksum_of_file(path))
        for name, path in named.items()
    }


def checksum_of_file(path: Path) -> int:
    """CRC-32 of a small file."""
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def _wrong_size(path: Path, size: int) -> str | None:
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        return f"{path} is missing."
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})."
    return None if found == size else f"{path} has {found:,} bytes instead of {size:,}."


def _encode_model(model: StoredModel) -> dict[str, Any]:
    tensors: dict[str, dict[str, Any]] = {}
    for (kind, name), place in model.places.items():
        tensors.setdefault(kind, {})[name] = {
            "file": place.file,
            "dtype": place.type_name,
            "shape": list(place.shape),
            "start": place.start,
            "sums": list(model.sums[kind, name]),
        }
    return {"class": model.kind, "folder": model.folder, "tied": dict(model.tied), "tensors": tensors}


def _decode_model(encoded: Mapping[str, Any]) -> StoredModel:
    entries = {(kind, name): entry for kind, named in encoded["tensors"].items() for name, entry in named.items()}
    places = {
        key: Place(entry["file"], _known_type(entry["dtype"]), tuple(entry["shape"]), entry["start"])
        for key, entry in entries.items()
    }
    sums = {key: (entry["sums"][0], entry["sums"][1]) for key, entry in entries.items()}
    return StoredModel(encoded["class"], encoded["folder"], encoded["tied"], places, sums)


def _known_type(name: str) -> str:
    if name not in ITEM_BYTES:
        raise ValueError(f"a tensor of type {name}")
    return name
