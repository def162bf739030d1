"""What a script calls to have its measurements kept: trackers, and what a step can tell of itself."""

from __future__ import annotations

from typing import Any

from zero_plugin.config.plugins import ProjectConfiguration
from zero_plugin.distributed.processes import Processes
from zero_plugin.distributed.together import announce
from zero_plugin.errors import LoopError
from zero_plugin.loop.training import Training
from zero_plugin.machine.device_memory import Meter
from zero_plugin.trackers.choose import plain_values
from zero_plugin.trackers.trackers import GeneralTracker, KnownTracker


class TrackingCalls:
    """The calls of the facade that concern trackers; they act on the main process and return at once on others.

    Attributes:
        log_with: the trackers that are asked for: classes of known ones, and the script's own objects.
        trackers: those that `init_trackers` has started.
    """

    log_with: list[type[KnownTracker] | GeneralTracker]
    trackers: list[GeneralTracker]
    project_configuration: ProjectConfiguration
    _processes: Processes
    _trained: list[Training]
    _meter: Meter

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Start the trackers of `log_with`.

        Args:
            project_name: of the run, as each tracker understands it.
            config: hyper-parameters to keep.
            init_kwargs: further arguments by tracker, e.g. `{"wandb": {"mode": "offline"}}`.

        Arguments for a tracker that `log_with` does not name have no effect, which a line says: scripts pass them
        whatever they are told to log with.
        """
        given = init_kwargs or {}
        if self._processes.rank != 0:
            return
        if strangers := sorted(given.keys() - {tracker.name for tracker in self.log_with}):
            announce(f"init_trackers(init_kwargs=…) is for {', '.join(strangers)}, which log_with does not name")
        for tracker in self.log_with:
            if isinstance(tracker, GeneralTracker):
                started = tracker
            else:
                started = tracker(project_name, self.project_configuration.logging_dir, **given.get(tracker.name, {}))
            started.start()
            self.trackers.append(started)
            if config is not None:
                started.store_init_configuration(config)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """The started tracker of that name; one that does nothing on other processes, and where none is started.

        Args:
            name: e.g. `wandb`.
            unwrap: what the tracker writes through, in place of the tracker.

        Raises:
            LoopError: others are started, and none of that name.
        """
        if self._processes.rank != 0 or not self.trackers:
            return GeneralTracker(_blank=True)
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker  # type: ignore[attr-defined]  # a subclass has it
        started = ", ".join(tracker.name for tracker in self.trackers)
        raise LoopError(
            f"no tracker {name!r} is started (started: {started}); name it in Accelerator(log_with=…) and call "
            "init_trackers(…)."
        )

    def log(
        self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Write measurements to every started tracker.

        Args:
            values: numbers, strings or dicts of numbers by name; tensors and arrays count as the numbers they hold.
            step: which step they are of.
            log_kwargs: further arguments by tracker, for its `log`.
        """
        if self._processes.rank != 0:
            return
        plain = plain_values(values)
        for tracker in self.trackers:
            tracker.log(plain, step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def metrics(self, units: int = 0, unit: str = "tokens") -> dict[str, float]:
        """What the last optimizer step tells of itself, for `log`; not collective, so one process may call it alone.

        Args:
            units: what this process has handled since the last call, e.g. tokens; 0 for not to say.
            unit: what they are.

        Returns:
            `lr` (of the first group); `grad_norm` (before clipping) where the step was clipped or measured; under fp16
            `loss_scale`, and `skipped_steps` since the last applied one; `tokens_per_second` of all processes, taken
            to be as fast as this one; `memory_available_gb`, of the GPU or of the machine. Of several models, each
            but the first has its number behind its names.
        """
        values: dict[str, float] = {}
        for number, training in enumerate(self._trained):
            behind = f"_{number}" if number else ""
            values.update({f"{name}{behind}": value for name, value in training.measure().items()})
        return values | self._meter.read(units, unit)
