"""Where a whole tensor is stored, and of which type, in safetensors' own words; known without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

__all__ = ["ITEM_BYTES", "Place"]

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
        from zero_plugin.checkpoint.safetensors_file import DTYPES

        return DTYPES[self.type_name]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.type_name]
