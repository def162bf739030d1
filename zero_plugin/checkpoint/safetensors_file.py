"""Write one safetensors file without a second copy of its tensors in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["DTYPE_NAMES", "write_file"]

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


def write_file(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write CPU tensors to `path` and wait until the disk has them.

    Format (huggingface/safetensors, README "Format"): 8 bytes with the header's size, little-endian; the header, JSON;
    the tensors' bytes without gaps. The library's own writer builds all of the bytes in memory first.
    """
    # Wide elements first, so that each tensor is aligned to its own element size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)  # the data begin at a multiple of 8 too
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for _, tensor in ordered:
            if tensor.numel():
                file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
