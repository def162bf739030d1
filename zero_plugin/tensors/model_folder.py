"""Hugging Face model folders and the headers of safetensors files, read without torch.

Where a whole tensor is stored, and of which type, in safetensors' own words; known without torch.

Reads which safetensors files hold a model folder's weights, and what their headers say; without torch.

The tensors of a Hugging Face model folder, from the heads of its safetensors files; without torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from zero_plugin.errors import CheckpointError

if TYPE_CHECKING:
    import torch


ITEM_BYTES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a whole tensor is stored.

    Attributes:
        file: path below the checkpoint's folder.
        type_name: safetensors' name of the stored tensor's type, e.g. `BF16`.
        shape: of the stored tensor.
        start: its first byte in the file.
    """

    file: str
    type_name: str
    shape: tuple[int, ...]
    start: int

    @property
    def dtype(self) -> torch.dtype:
        """The type, as torch has it."""
        from zero_plugin.tensors.safetensors_file import DTYPES

        return DTYPES[self.type_name]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.type_name]


_LARGEST_HEADER: Final = 100_000_000  # bytes; the safetensors library's own bound


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file.

    Attributes:
        type_name: safetensors' name of its type, e.g. `BF16`.
        shape: of it.
        start, end: its bytes in the file, the last one excluded.
    """

    type_name: str
    shape: tuple[int, ...]
    start: int
    end: int


def weight_files(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Names of the files with a model's weights: `model.safetensors`, else those of its index, else all of them.

    Returns:
        The names, and what the index says: tensor → file; empty where it is not asked.

    Raises:
        OSError, ValueError: the index cannot be read, or has no `weight_map`.
    """
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"], {}
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(path.name for path in folder.glob("*.safetensors")), {}
    named = read_keys(index).get("weight_map")
    if not isinstance(named, dict):
        raise ValueError(f"{index} has no weight_map")
    return sorted(set(named.values())), named


def read_header(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors of a safetensors file, and the texts that it carries.

    Format (huggingface/safetensors, README "Format"): 8 bytes with the header's length, little-endian; the header,
    JSON; the tensors' bytes.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file; the message says why.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(_LARGEST_HEADER, path.stat().st_size):
            raise ValueError(f"a header of {length:,} bytes")
        header = json.loads(file.read(length))
    try:
        metadata = header.pop("__metadata__", {})
        tensors = {}
        for name, entry in header.items():
            begin, end = (8 + length + int(offset) for offset in entry["data_offsets"])
            tensors[name] = StoredTensor(entry["dtype"], tuple(map(int, entry["shape"])), begin, end)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(str(error)) from error
    return tensors, metadata


def read_keys(path: Path) -> dict[str, Any]:
    """A JSON file with keys.

    Raises:
        OSError, ValueError: it is none.
    """
    content = json.loads(path.read_text("utf-8"))
    if not isinstance(content, dict):
        raise ValueError("it holds no keys")
    return content


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
