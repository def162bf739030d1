"""Read and write safetensors headers, and list the tensors of Hugging Face model folders; without torch.

Format (huggingface/safetensors, README "Format"): 8 bytes with the header's length, little-endian; the header, JSON;
the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from zero_plugin.errors import CheckpointError

if TYPE_CHECKING:
    import torch


SINGLE_NAME: Final = "model.safetensors"
INDEX_NAME: Final = "model.safetensors.index.json"
_PICKLED: Final = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_LARGEST_HEADER: Final = 100_000_000  # bytes; the safetensors library has the same bound.
_VALUE_BYTES: Final = 100  # bound of the memory of a parsed JSON value.
_FREE_BYTES: Final = 2**26  # allowed for any header, even in a small file.
_SHOWN: Final = 30  # characters of a value in a message
TYPES: Final[Mapping[str, tuple[str, int]]] = {  # the format's name → torch's, and the bytes of an element
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "C64": ("complex64", 8),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
TYPE_NAMES: Final[Mapping[str, str]] = {f"torch.{of_torch}": name for name, (of_torch, _) in TYPES.items()}


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a stored unpartitioned tensor.

    Attributes:
        file: path below the checkpoint's folder.
        type_name: safetensors' name of the tensor's dtype, e.g. `BF16`.
        shape: the tensor's shape.
        start: position of the tensor's first byte in the file.
    """

    file: str
    type_name: str
    shape: tuple[int, ...]
    start: int

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype."""
        import torch

        dtype: torch.dtype = getattr(torch, TYPES[self.type_name][0])
        return dtype

    @property
    def size(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * TYPES[self.type_name][1]


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """The tensors in the files of one model.

    Attributes:
        source: the folder or file that the caller gave.
        folder: base folder of the files in `places`.
        places: name → the tensor's place.
        tied: name → the stored name of the same tensor, if a file lists the pair.
        config: the content of `config.json`; empty without this file.
    """

    source: Path
    folder: Path
    places: Mapping[str, Place]
    tied: Mapping[str, str]
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model_class(self) -> str:
        """The name of the model's class in `config.json`, or `model`."""
        named = self.config.get("architectures") or ["model"]
        return str(named[0])

    def find(self, name: str) -> str | None:
        """Return the stored name of a tensor, or None if the files do not hold the tensor."""
        return next((stored for stored in (name, self.tied.get(name)) if stored in self.places), None)


def weight_files(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Find the files with a model's weights: `model.safetensors`, or the index's files, or all `*.safetensors` files.

    Returns:
        The names, and the index's map of tensor → file, which is empty if the index was not used.

    Raises:
        OSError, ValueError: the index cannot be read, has no `weight_map`, or names a file outside the folder.
    """
    if (folder / SINGLE_NAME).is_file():
        return [SINGLE_NAME], {}
    index = folder / INDEX_NAME
    if not index.is_file():
        return sorted(path.name for path in folder.glob("*.safetensors")), {}
    named = read_keys(index).get("weight_map")
    if not isinstance(named, dict):
        raise ValueError(f"{index} has no weight_map")
    for file in named.values():
        refuse_outside(file)
    return sorted(set(named.values())), named


def refuse_outside(name: Any) -> None:
    """Refuse a file name, read from an untrusted file, that leads outside the folder.

    Raises:
        ValueError: the name leads outside the folder, or is not a file name.
    """
    path = PurePosixPath(name) if isinstance(name, str) else None
    if path is None or path.is_absolute() or ".." in path.parts or "\0" in str(name):
        raise ValueError(f"{repr(name) if path else shorten(name)} is no path inside the folder")


def read_header(path: Path, name: str = "") -> tuple[dict[str, Place], dict[str, str], int]:
    """Read the header of a safetensors file.

    Args:
        path: the file; only its header has to exist.
        name: the file's name in the places. Default: the name in `path`.

    Returns:
        The places of the tensors, the metadata texts, and the position of the last tensor's end.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not in safetensors format; the message gives the reason.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(_LARGEST_HEADER, path.stat().st_size):
            raise ValueError(f"a header of {length:,} bytes")
        text = file.read(length)
        # Bound the memory of the parsed header by the file's size: a JSON value takes at most a hundred bytes.
        if _VALUE_BYTES * sum(map(text.count, (b",", b"{", b"["))) > 2 * path.stat().st_size + _FREE_BYTES:
            raise ValueError("a header of more values than tensors")
        header = parse_json(text)
    try:
        metadata = {name: str(text) for name, text in (header.pop("__metadata__", None) or {}).items()}
        places: dict[str, Place] = {}
        last = 0
        for tensor, entry in header.items():
            begin, end = (8 + length + whole_number(offset) for offset in entry["data_offsets"])
            place = Place(name or path.name, str(entry["dtype"]), read_shape(entry["shape"]), begin)
            if place.type_name in TYPES and place.size != end - begin:
                raise ValueError(f"{tensor} has {end - begin:,} bytes instead of {place.size:,}")
            places[tensor] = place
            last = max(last, end)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(str(error)) from error
    return places, metadata, last


def whole_number(number: Any, most: int = 2**63 - 1) -> int:
    """Return a size or position that was read from a file. Raise a ValueError if it is no integer from 0 to `most`."""
    if type(number) is not int or not 0 <= number <= most:
        raise ValueError(f"{shorten(number)} instead of a number from 0 to {most}")
    return number


def read_shape(lengths: Any) -> tuple[int, ...]:
    """Return a shape that was read from a file. Raise a ValueError if no tensor can have this shape.

    The loop checks the product after each length: the product of thousands of lengths would take minutes.
    """
    shape, elements = tuple(map(whole_number, lengths)), 1
    for length in shape:
        elements *= max(length, 1)
        if elements >= 2**63:
            raise ValueError(f"a tensor of the shape {shorten(shape)}")
    return shape


def shorten(value: Any) -> str:
    """Return at most thirty characters of a value that was read from a file, for a message."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def encode_header(
    entries: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Encode the header of a file. Tensors with larger elements come first, so each tensor is aligned.

    Args:
        entries: name, dtype and shape of each tensor.
        metadata: texts to store in the header.

    Returns:
        The first bytes of the file, and name → (start, end) of each tensor in the file, in the file's order.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    ranges: dict[str, tuple[int, int]] = {}
    end = 0
    for name, dtype, shape in sorted(entries, key=lambda entry: (-entry[1].itemsize, entry[0])):
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": TYPE_NAMES[str(dtype)], "shape": list(shape), "data_offsets": [start, end]}
        ranges[name] = (start, end)
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)  # pad the header, so the data begin at a multiple of 8 too
    first = len(encoded).to_bytes(8, "little") + encoded
    return first, {name: (start + len(first), end + len(first)) for name, (start, end) in ranges.items()}


def read_keys(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        OSError, ValueError: the file cannot be read, or holds no JSON object.
    """
    return parse_json(path.read_bytes())


def parse_json(content: bytes) -> dict[str, Any]:
    """Parse an untrusted JSON text that holds an object.

    Raises:
        ValueError: the text is no JSON object, or its values nest deeper than Python's parser allows.
    """
    try:
        found = json.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError("its values nest too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("it holds no keys")
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object, as `read_keys`.

    Raises:
        CheckpointError: the file cannot be read, or holds no JSON object.
    """
    try:
        return read_keys(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error


def read_model_folder(folder: Path) -> StoredWeights:
    """List the weights of a model folder, in the files that `weight_files` finds.

    Raises:
        CheckpointError: the folder has no safetensors, or a file is missing or damaged. The message names the file.
    """
    config = folder / "config.json"
    try:
        files, indexed = weight_files(folder)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} has an index that cannot be read: {error}.") from error
    if not files:
        has_pickles = any((folder / name).exists() for name in _PICKLED)
        hint = "Its weights are pickles (pytorch_model.bin): save them as safetensors first." if has_pickles else ""
        raise CheckpointError(f"{folder} has no *.safetensors, so it is not a readable model folder.\n{hint}".strip())
    places: dict[str, Place] = {}
    tied: dict[str, str] = {}
    for file in files:
        own, own_tied = read_complete_file(folder / file, file)
        places |= own
        tied |= own_tied
    lost = sorted(set(indexed) - set(places))
    if lost:
        raise CheckpointError(f"{folder}'s index names {lost[0]}, which {indexed[lost[0]]} does not hold.")
    return StoredWeights(folder, folder, places, tied, read_json(config) if config.is_file() else {})


def read_complete_file(path: Path, name: str) -> tuple[dict[str, Place], dict[str, str]]:
    """Read the header of a safetensors file. Check that the file is complete and has only supported dtypes.

    Returns:
        The `Place` of each tensor by name; and the map of further names to stored names.

    Raises:
        CheckpointError: the file is missing, truncated, not a safetensors file, or has an unsupported dtype.
    """
    try:
        status = path.stat()
        size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        places, metadata, end = read_header(path, name)
        for tensor, place in places.items():
            if place.type_name not in TYPES:
                raise ValueError(f"{tensor} is of type {shorten(place.type_name)}")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}.") from error
    if end > size:
        raise CheckpointError(f"{path} has {size:,} bytes instead of {end:,}.")
    return places, {alias: kept for alias, kept in metadata.items() if kept in places and alias not in places}
