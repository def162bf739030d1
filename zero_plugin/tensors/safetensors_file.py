"""The safetensors format: a file's header, and writing one file without a second copy of its tensors in memory."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES: Mapping[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def encode_header(
    entries: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """The header of a file, and where each tensor's bytes are in it; tensors in the order given, without gaps.

    Format (huggingface/safetensors, README "Format"): 8 bytes with the header's size, little-endian; the header, JSON;
    the tensors' bytes without gaps.

    Args:
        entries: name, dtype and shape of each tensor.
        metadata: texts that the file carries along.

    Returns:
        The first bytes of the file, and name → (start, end) from its beginning.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    ranges: dict[str, tuple[int, int]] = {}
    end = 0
    for name, dtype, shape in entries:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        ranges[name] = (start, end)
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)  # the data begin at a multiple of 8 too
    first = len(encoded).to_bytes(8, "little") + encoded
    return first, {name: (start + len(first), end + len(first)) for name, (start, end) in ranges.items()}


def write_file(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write CPU tensors to `path` and wait until the disk has them.

    The library's own writer builds all of the bytes in memory first.
    """
    ordered = sorted(tensors.items(), key=lambda item: sort_key(item[0], item[1].dtype))
    header, _ = encode_header(((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in ordered), metadata)
    with path.open("wb") as file:
        file.write(header)
        for _, tensor in ordered:
            if tensor.numel():
                file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def sort_key(name: str, dtype: torch.dtype) -> tuple[int, str]:
    """The order of tensors in a file: wide elements first, so that each is aligned to its own element size."""
    return -dtype.itemsize, name
