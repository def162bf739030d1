"""Tells errors that say that memory ran out from others."""

from __future__ import annotations

from typing import Final

import torch

__all__ = ["is_out_of_memory"]

_OUT_OF_MEMORY: Final = (
    " out of memory.",  # CUDA, ROCm
    "CUDA error: out of memory",  # of the driver, beside torch's allocator; lines of advice follow
    "HIP error: out of memory",
    "DefaultCPUAllocator: can't allocate memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory ran out, on a GPU or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)
