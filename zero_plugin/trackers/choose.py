"""Which trackers `log_with` asks for, and what they are given."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch

from zero_plugin.config.choices import LoggerType
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.trackers.trackers import (
    GeneralTracker,
    JsonlTracker,
    KnownTracker,
    MLflowTracker,
    TensorBoardTracker,
    WandBTracker,
)

_TRACKERS: Final[dict[str, type[KnownTracker]]] = {
    kind.name: kind for kind in (JsonlTracker, TensorBoardTracker, WandBTracker, MLflowTracker)
}


def get_available_trackers() -> list[LoggerType]:
    """Those whose package is installed; `jsonl` needs none."""
    return [LoggerType(name) for name, kind in _TRACKERS.items() if _is_installed(kind)]


def choose_trackers(
    log_with: Any, logging_dir: str | os.PathLike[str] | None
) -> list[type[KnownTracker] | GeneralTracker]:
    """The trackers that `log_with` names: classes of known ones, and objects as they are.

    Args:
        log_with: names, `LoggerType`s or `GeneralTracker`s, one or several; `all` for every one that is installed and,
            without a `logging_dir`, writes no files.
        logging_dir: where those that write files do.

    Raises:
        ConfigError: a name is not known, its package is not installed, or it needs a folder; names all such.
    """
    several = log_with if isinstance(log_with, Iterable) and not isinstance(log_with, str) else [log_with]
    given = [each for each in several if each is not None]
    names = [each if isinstance(each, GeneralTracker) else str(each) for each in given]
    if "all" in names:
        known = [str(name) for name in get_available_trackers()]
        everywhere = [name for name in known if logging_dir or not _TRACKERS[name].requires_logging_directory]
        names = [*(each for each in names if isinstance(each, GeneralTracker)), *everywhere]
    chosen = dict.fromkeys(names)
    found = [_find_problem(name, logging_dir) for name in chosen if isinstance(name, str)]
    if problems := [problem for problem in found if problem is not None]:
        raise ConfigError(problems)
    return [_TRACKERS[each] if isinstance(each, str) else each for each in chosen]


def _find_problem(name: str, logging_dir: Any) -> Problem | None:
    where, kind = f"Accelerator(log_with={name!r})", _TRACKERS.get(name)
    if kind is None:
        legal = ", ".join([*_TRACKERS, "all"])
        return Problem(where, "", "is no tracker", f"Write {legal}, or pass an object of your own GeneralTracker.")
    if not _is_installed(kind):
        return Problem(where, "", f"{kind.needs} is not installed", f"pip install {kind.needs}")
    if kind.requires_logging_directory and logging_dir is None:
        return Problem(where, "", "it writes files, and no folder is given", "Add project_dir='…'.")
    return None


def _is_installed(kind: type[KnownTracker]) -> bool:
    return not kind.needs or importlib.util.find_spec(kind.needs) is not None


def plain_values(values: Any) -> Any:
    """Tensors and arrays, also in dicts, as the numbers, or lists of numbers, that they hold."""
    if isinstance(values, Mapping):
        return {key: plain_values(value) for key, value in values.items()}
    if isinstance(values, torch.Tensor) or (hasattr(values, "dtype") and hasattr(values, "tolist")):
        return values.item() if math.prod(values.shape) == 1 else values.tolist()
    return values
