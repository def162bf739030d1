"""The trackers of a run that have been started, and what is logged to them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from zero_plugin.config.plugins import ProjectConfiguration
from zero_plugin.errors import LoopError
from zero_plugin.trackers.choose import plain_values
from zero_plugin.trackers.trackers import GeneralTracker, KnownTracker

_log = logging.getLogger(__name__)


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
            plain = plain_values(values)
            for tracker in self.started:
                tracker.log(plain, step=step, **log_kwargs.get(tracker.name, {}))

    def finish(self) -> None:
        """Have all of them write what they keep, though one fails."""
        with ExitStack() as ends:
            for tracker in reversed(self.started):
                ends.callback(tracker.finish)
            self.started.clear()
