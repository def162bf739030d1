"""Reads from a model's folder, its config.json and the headers of its weight files, what resolution needs to know."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

from zero_plugin.errors import ConfigError, Problem
from zero_plugin.probe.safetensors_header import read_header, read_keys, weight_files
from zero_plugin.probe.width import common_width, stated_width
from zero_plugin.resolve.facts import ModelFacts

__all__ = ["probe_model_folder", "weight_shapes"]

_CONFIG: Final = "config.json"


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
    shapes = weight_shapes(folder, where).values()
    config = folder / _CONFIG
    if not config.is_file() and not shapes:
        raise _error(where, f"{folder} holds neither {_CONFIG} nor *.safetensors", "Name the folder of a model.")
    sizes = [math.prod(shape) for shape in shapes]
    hidden, reason = stated_width(_read_config(config, where) if config.is_file() else None, _CONFIG)
    if hidden is None:
        hidden, reason = common_width(shapes)
    return ModelFacts(hidden, reason, max(sizes, default=0), sum(sizes))


def weight_shapes(folder: Path, where: str) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor in a model's folder, by name, from the headers of its safetensors; empty without any.

    Args:
        folder: of the model.
        where: who named it, for errors.

    Raises:
        ConfigError: a file is missing or broken.
    """
    file = folder
    try:
        shapes: dict[str, tuple[int, ...]] = {}
        for name in weight_files(folder)[0]:
            file = folder / name
            shapes |= {tensor: stored.shape for tensor, stored in read_header(file)[0].items()}
    except (OSError, ValueError) as error:
        what = str(error) if file == folder else f"{file} is no safetensors file: {error}"
        raise _error(where, what, "Download the file again.") from None
    return shapes


def _read_config(file: Path, where: str) -> dict[str, Any]:
    try:
        return read_keys(file)
    except (OSError, ValueError) as error:
        raise _error(where, f"{file} cannot be read: {error}", "Download the file again.") from None


def _error(where: str, message: str, fix: str) -> ConfigError:
    return ConfigError([Problem(where, "", message, fix)])
