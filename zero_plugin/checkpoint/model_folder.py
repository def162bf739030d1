"""The tensors of a Hugging Face model folder, from the heads of its safetensors files; without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from zero_plugin.checkpoint.place import ITEM_BYTES, Place
from zero_plugin.errors import CheckpointError
from zero_plugin.probe.safetensors_header import read_header, read_keys, weight_files

__all__ = ["ModelFolder", "read_head", "read_model_folder"]

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
    config = folder / "config.json"
    try:
        files, indexed = weight_files(folder)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} has an index that cannot be read: {error}.") from error
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
        raise CheckpointError(f"{folder}'s index names {lost[0]}, which {indexed[lost[0]]} does not hold.")
    return ModelFolder(places, tied, _read_config(config) if config.is_file() else {})


def read_head(path: Path, name: str) -> tuple[dict[str, Place], dict[str, str]]:
    """Where each tensor of a safetensors file is, and the texts that the file carries.

    Args:
        path: of the file.
        name: what the places call it.

    Raises:
        CheckpointError: it is missing, cut off, or no such file.
    """
    try:
        size = path.stat().st_size
        stored, metadata = read_header(path)
        places = {}
        for tensor, entry in stored.items():
            if entry.type_name not in ITEM_BYTES:
                raise ValueError(f"{tensor} is of type {entry.type_name}")
            places[tensor] = place = Place(name, entry.type_name, entry.shape, entry.start)
            if entry.end - entry.start != place.size:
                raise ValueError(f"{tensor} has {entry.end - entry.start:,} bytes instead of {place.size:,}")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is no safetensors file that can be read: {error}.") from error
    end = max((entry.end for entry in stored.values()), default=0)
    if end > size:
        raise CheckpointError(f"{path} has {size:,} bytes instead of {end:,}.")
    return places, metadata


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return read_keys(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
