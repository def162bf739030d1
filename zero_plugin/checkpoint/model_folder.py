"""The tensors of a Hugging Face model folder, from the heads of its safetensors files; without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from zero_plugin.checkpoint.place import ITEM_BYTES, Place
from zero_plugin.errors import CheckpointError

__all__ = ["ModelFolder", "read_head", "read_model_folder"]

_LARGEST_HEAD: Final = 100_000_000  # bytes; the safetensors library's own bound
_PICKLED: Final = ("pytorch_model.bin", "pytorch_model.bin.index.json")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model that lies in a folder.

    Attributes:
        places: name → where the tensor is, below the folder.
        tied: name → the weight whose tensor it shares.
        config: `config.json`; empty without.
    """

    places: Mapping[str, Place]
    tied: Mapping[str, str]
    config: Mapping[str, Any]

    @property
    def model_class(self) -> str:
        """As the configuration names it."""
        named = self.config.get("architectures") or ["model"]
        return str(named[0])


def read_model_folder(folder: Path) -> ModelFolder:
    """What a model folder holds; of weights the files of the index, else `model.safetensors`, else all of them.

    Raises:
        CheckpointError: it has no safetensors, or a file of it is missing or damaged; the message names it.
    """
    index, single, config = (
        folder / name for name in ("model.safetensors.index.json", "model.safetensors", "config.json")
    )
    indexed: dict[str, str] = (
        _read_json(index).get("weight_map", {}) if index.is_file() and not single.is_file() else {}
    )
    found = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    files = sorted(set(indexed.values())) or [path.name for path in found]
    if not files:
        has_pickles = any((folder / name).exists() for name in _PICKLED)
        hint = "Its weights are pickles (pytorch_model.bin): save them as safetensors first." if has_pickles else ""
        raise CheckpointError(
            f"{folder} has no *.safetensors, so it is no model folder that can be read.\n{hint}".strip()
        )
    places: dict[str, Place] = {}
    tied: dict[str, str] = {}
    for file in files:
        own, metadata = read_head(folder / file, name=file)
        places |= own
        tied |= {alias: kept for alias, kept in metadata.items() if kept in own and alias not in own}
    lost = sorted(set(indexed) - set(places))
    if lost:
        raise CheckpointError(f"{index} names {lost[0]}, which {indexed[lost[0]]} does not hold.")
    return ModelFolder(places, tied, _read_json(config) if config.is_file() else {})


def read_head(path: Path, name: str) -> tuple[dict[str, Place], dict[str, str]]:
    """Where each tensor of a safetensors file is, and the texts that the file carries.

    Format (huggingface/safetensors, README "Format"): 8 bytes with the head's length, little-endian; the head, JSON;
    the tensors' bytes.

    Args:
        path: of the file.
        name: what the places call it.

    Raises:
        CheckpointError: it is missing, cut off, or no such file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(_LARGEST_HEAD, size):
                raise ValueError(f"a head of {length:,} bytes")
            head = json.loads(file.read(length))
        metadata = head.pop("__metadata__", {})
        places = {}
        for tensor, entry in head.items():
            begin, end = entry["data_offsets"]
            if entry["dtype"] not in ITEM_BYTES:
                raise ValueError(f"{tensor} is of type {entry['dtype']}")
            place = Place(name, entry["dtype"], tuple(map(int, entry["shape"])), 8 + length + begin)
            if end - begin != place.size:
                raise ValueError(f"{tensor} has {end - begin:,} bytes instead of {place.size:,}")
            places[tensor] = place
        end = max((place.start + place.size for place in places.values()), default=0)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing.") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no safetensors file that can be read: {error}.") from error
    if end > size:
        raise CheckpointError(f"{path} has {size:,} bytes instead of {end:,}.")
    return places, metadata


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no keys.")
    return content
