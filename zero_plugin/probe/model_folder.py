"""Reads from a model's folder, its config.json and the headers of its weight files, what resolution needs to know."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from zero_plugin.errors import ConfigError, Problem
from zero_plugin.probe.width import common_width, stated_width
from zero_plugin.resolve.facts import ModelFacts

__all__ = ["probe_model_folder"]

_CONFIG: Final = "config.json"
_LARGEST_HEADER: Final = 100_000_000  # bytes; the safetensors library's own bound


def probe_model_folder(folder: str | Path, where: str) -> ModelFacts:
    """Sizes of the model in a transformers folder; no tensor is read, and neither torch nor transformers imported.

    Without weight files the sizes of the parameters stay unknown (0).

    Args:
        folder: holds `config.json`, weights as safetensors, or both.
        where: who named it, for errors, e.g. `--model`.

    Raises:
        ConfigError: there is no such folder, it holds no model, or a file in it is broken.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise _error(where, f"{folder} is no folder", "Name the folder of a transformers model.")
    config, files = folder / _CONFIG, _weight_files(folder, where)
    if not config.is_file() and not files:
        raise _error(where, f"{folder} holds neither {_CONFIG} nor *.safetensors", "Name the folder of a model.")
    stated = _read_json(config, where) if config.is_file() else None
    shapes = [shape for file in files for shape in _shapes(file, where)]
    sizes = [math.prod(shape) for shape in shapes]
    hidden, reason = stated_width(stated, _CONFIG)
    if hidden is None:
        hidden, reason = common_width(shapes)
    return ModelFacts(hidden, reason, max(sizes, default=0), sum(sizes))


def _weight_files(folder: Path, where: str) -> list[Path]:
    """The files of the model's index, else `model.safetensors`, else every safetensors file of the folder."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        names = _read_json(index, where).get("weight_map")
        if not isinstance(names, dict):
            raise _error(where, f"{index} has no weight_map", "Download the model again.")
        return [folder / name for name in sorted(set(names.values()))]
    return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))


def _shapes(file: Path, where: str) -> Iterator[tuple[int, ...]]:
    """The shape of every tensor, from the header: 8 bytes with its length, little-endian, then JSON."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > _LARGEST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(stream.read(length))
        for name, tensor in header.items():
            if name != "__metadata__":
                yield tuple(map(int, tensor["shape"]))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise _error(where, f"{file} is no safetensors file: {error}", "Download the file again.") from None


def _read_json(file: Path, where: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise _error(where, f"{file} cannot be read: {error}", "Download the file again.") from None
    if not isinstance(content, dict):
        raise _error(where, f"{file} holds no keys", "Download the file again.")
    return content


def _error(where: str, message: str, fix: str) -> ConfigError:
    return ConfigError([Problem(where, "", message, fix)])
