"""Real text that every machine has: the source of Python's standard library, as blocks of bytes."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from zero_plugin.errors import MachineError

__all__ = ["Blocks", "read_text"]

_LEFT_OUT = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


def read_text(*, max_bytes: int = 8_000_000, held_out_bytes: int = 131_072) -> tuple[bytes, bytes]:
    """Training text and held-out text, from different files; the same on every call and every process.

    Args:
        max_bytes: largest size of the training text.
        held_out_bytes: size of the held-out text.

    Raises:
        MachineError: the interpreter came without its library's sources.
    """
    files = iter(_files(Path(sysconfig.get_path("stdlib"))))
    held_out = _join(files, held_out_bytes)
    train = _join(files, max_bytes)
    if not train:
        raise MachineError(
            f"{sysconfig.get_path('stdlib')} holds too few Python sources to train on ({len(held_out)} bytes); "
            "run the demo with a Python whose standard library is there as .py files"
        )
    return train, held_out


def _files(root: Path) -> list[Path]:
    files = [p.relative_to(root) for p in root.rglob("*.py") if not _LEFT_OUT.intersection(p.relative_to(root).parts)]
    # Sorted by a hash of the name: a fixed order in which any beginning is a fair sample of the whole library.
    files.sort(key=lambda p: hashlib.sha256(p.as_posix().encode()).digest())
    return [root / p for p in files]


def _join(files: Iterator[Path], limit: int) -> bytes:
    text = bytearray()
    while len(text) < limit and (file := next(files, None)):
        text += file.read_bytes()
    return bytes(text[:limit])


class Blocks(Dataset[tuple[Tensor, Tensor]]):
    """Text cut into `block` bytes each: item i is (bytes, the bytes one later), both `[block]` of int64."""

    def __init__(self, text: bytes, block: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.block = block

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.block

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = range(0, len(self) * self.block, self.block)[index]  # an IndexError where there is no such block
        window = self.text[start : start + self.block + 1].long()
        return window[:-1], window[1:]
