"""Reads which safetensors files hold a model folder's weights, and what their headers say; without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

__all__ = ["StoredTensor", "read_header", "read_keys", "weight_files"]

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
