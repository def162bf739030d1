"""The files of a checkpoint, of safetensors or by `torch.save`, and their tensors, memory-mapped."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_plugin.bigmodel.stored import open_safetensors
from zero_plugin.errors import CheckpointError

__all__ = ["WeightsFile", "find_checkpoint_files"]

_WHOLE = ("model.safetensors", "pytorch_model.bin")
_INDICES = ("*.safetensors.index.json", "*.index.json")


class WeightsFile:
    """One open file of weights.

    Args:
        path: `….safetensors`, or a file by `torch.save`, of which no code is run. One by `torch.save` before torch 1.6
            is read whole, any other only as far as tensors are used.

    Raises:
        CheckpointError: it is missing or damaged.
        ValueError: its weights are another framework's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.is_safetensors = path.suffix == ".safetensors"
        if self.is_safetensors:
            self._file: Any = open_safetensors(path)
            framework = (self._file.metadata() or {}).get("format", "pt")
            if framework != "pt":
                raise ValueError(f"{path} has weights of the format {framework!r}; PyTorch's ('pt') are needed.")
            self.names: list[str] = list(self._file.keys())
        else:
            self._tensors = _load_mapped(path)
            self.names = list(self._tensors)

    def read(self, name: str) -> Tensor:
        """A tensor, on the CPU; its values are read when they are used."""
        tensor: Tensor = self._file.get_tensor(name) if self.is_safetensors else self._tensors[name]
        return tensor


def find_checkpoint_files(checkpoint: Path) -> list[Path]:
    """The files with a checkpoint's weights.

    Args:
        checkpoint: a file of weights, an index (`….json`), or a folder with `model.safetensors`, `pytorch_model.bin` or
            one index; safetensors come first.

    Raises:
        ValueError: there is none, or there are several.
        CheckpointError: a file that the index names is missing.
    """
    if checkpoint.is_dir():
        for name in _WHOLE:
            if (checkpoint / name).is_file():
                return [checkpoint / name]
        found = next((files for pattern in _INDICES if (files := sorted(checkpoint.glob(pattern)))), [])
        if len(found) > 1:
            raise ValueError(f"{checkpoint} has several indices: {', '.join(f.name for f in found)}; pass one of them.")
        if not found:
            raise ValueError(f"{checkpoint} has no {' and no '.join(_WHOLE)}, and no index of several (….index.json).")
        checkpoint = found[0]
    if not checkpoint.is_file():
        raise ValueError(
            f"there is no checkpoint {checkpoint}; pass a file of weights, an index, or a folder with them."
        )
    if checkpoint.suffix != ".json":
        return [checkpoint]
    index = json.loads(checkpoint.read_text(encoding="utf-8"))
    files = [checkpoint.parent / name for name in sorted(set(index.get("weight_map", index).values()))]
    if missing := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(f"{checkpoint} names {', '.join(missing)}, which are not there.")
    return files


def _load_mapped(path: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    return tensors
