"""The trackers that `log_with` asks for, those of them that have been started, and what is logged to them."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Final

import torch

from zero_plugin.config.choices import LoggerType
from zero_plugin.config.plugins import ProjectConfiguration
from zero_plugin.errors import ConfigError, LoopError, Problem
from zero_plugin.trackers.trackers import (
    GeneralTracker,
    JsonlTracker,
    KnownTracker,
    MLflowTracker,
    TensorBoardTracker,
    WandBTracker,
)

_log = logging.getLogger(__name__)

_TRACKERS: Final[dict[str, type[KnownTracker]]] = {
    kind.name: kind for kind in (JsonlTracker, TensorBoardTracker, WandBTracker, MLflowTracker)
}


def get_available_trackers() -> list[LoggerType]:
    """The trackers whose package is installed; `jsonl` needs none."""
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


class Trackers:
    """The started trackers of one run. They act on the main process and do nothing on others.

    Args:
        project: has the folder of those that write files.
        rank: of this process.

    Attributes:
        started: the trackers.
    """

    def __init__(self, project: ProjectConfiguration, rank: int) -> None:
        self.started: list[GeneralTracker] = []
        self._project = project
        self._is_main = rank == 0

    def start(
        self,
        log_with: list[type[KnownTracker] | GeneralTracker],
        project_name: str,
        config: dict[str, Any] | None,
        init_kwargs: Mapping[str, dict[str, Any]],
    ) -> None:
        """Start those of `log_with`; see `Accelerator.init_trackers`."""
        if not self._is_main:
            return
        if unknown := sorted(init_kwargs.keys() - {tracker.name for tracker in log_with}):
            _log.warning("init_trackers(init_kwargs=…) is for %s, which log_with does not name", ", ".join(unknown))
        for tracker in log_with:
            if not isinstance(tracker, GeneralTracker):
                tracker = tracker(project_name, self._project.logging_dir, **init_kwargs.get(tracker.name, {}))
            tracker.start()
            self.started.append(tracker)
            if config is not None:
                tracker.store_init_configuration(config)

    def find(self, name: str, *, unwrap: bool) -> Any:
        """The started tracker of that name; see `Accelerator.get_tracker`."""
        if not self._is_main or not self.started:
            return GeneralTracker(_blank=True)
        for tracker in self.started:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker  # type: ignore[attr-defined]  # a subclass has it
        started = ", ".join(tracker.name for tracker in self.started)
        raise LoopError(
            f"no tracker {name!r} is started (started: {started}); name it in Accelerator(log_with=…) and call "
            "init_trackers(…)."
        )

    def log(self, values: dict[str, Any], step: int | None, log_kwargs: Mapping[str, dict[str, Any]]) -> None:
        """Write measurements to every started tracker; see `Accelerator.log`."""
        if self._is_main:
            plain = _plain_values(values)
            for tracker in self.started:
                tracker.log(plain, step=step, **log_kwargs.get(tracker.name, {}))

    def finish(self) -> None:
        """Have all of them write what they keep, though one fails."""
        with ExitStack() as ends:
            for tracker in reversed(self.started):
                ends.callback(tracker.finish)
            self.started.clear()


def _plain_values(values: Any) -> Any:
    """Tensors and arrays, also in dicts, as the numbers, or lists of numbers, that they hold."""
    if isinstance(values, Mapping):
        return {key: _plain_values(value) for key, value in values.items()}
    if isinstance(values, torch.Tensor) or (hasattr(values, "dtype") and hasattr(values, "tolist")):
        return values.item() if math.prod(values.shape) == 1 else values.tolist()
    return values
