"""Experiment trackers: their base class, the built-in ones, the choice by `log_with`, and the started ones."""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, TypeAlias, TypeVar

import torch

from zero_plugin.config.choices import LoggerType
from zero_plugin.config.handlers import ProjectConfiguration
from zero_plugin.distributed.collectives import process_index
from zero_plugin.distributed.messages import once
from zero_plugin.errors import ConfigError, LoopError, Problem

_log = logging.getLogger(__name__)

Method = TypeVar("Method", bound=Callable[..., Any])


def on_main_process(method: Method) -> Method:
    """Decorate a tracker's method to run on the main process only, unless its `main_process_only` is False."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_here = not getattr(self, "main_process_only", True) or process_index() == 0
        return method(self, *args, **kwargs) if is_here else None

    return run  # type: ignore[return-value]  # of the same signature


class GeneralTracker:
    """An experiment tracker. Subclass this class for your own tracker.

    A subclass has a `name`, a `requires_logging_directory` (True if the tracker writes files), and a `tracker`: the
    object that it writes to. Example, with all values in a list:

        class Memory(GeneralTracker):
            name = "memory"
            requires_logging_directory = False
            tracker = []

            def log(self, values, step=None, **_):
                self.tracker.append((step, values))

        accelerator = Accelerator(log_with=Memory())
        accelerator.init_trackers("run")
        accelerator.log({"loss": 0.5}, step=1)
        print(accelerator.get_tracker("memory", unwrap=True))

    Raises:
        NotImplementedError: a subclass lacks one of the three; the error names the missing ones.
    """

    main_process_only: ClassVar[bool] = True
    name: str
    requires_logging_directory: bool

    def __init__(self, _blank: bool = False) -> None:
        missing = [part for part in ("name", "requires_logging_directory", "tracker") if part not in dir(self)]
        if missing and not _blank:
            raise NotImplementedError(
                f"{type(self).__name__} lacks {', '.join(missing)}. A tracker needs the attributes name, "
                "requires_logging_directory and tracker."
            )

    def start(self) -> None:
        """Open the run; called once, by `init_trackers`."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the run's hyperparameters.

        Args:
            values: numbers, booleans, strings and None by name.
        """

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write measurements.

        Args:
            values: numbers, strings, or dicts of numbers, by name.
            step: the step of these values.
            **kwargs: for the object that the tracker writes to.
        """

    def finish(self) -> None:
        """Close the run."""


class KnownTracker(GeneralTracker):
    """A tracker that `log_with` accepts by name.

    Attributes:
        tracker: the object that the tracker writes to, once it is started.
    """

    needs: ClassVar[tuple[str, ...]] = ()  # the modules that must be installed
    tracker: Any = None

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = Path(logging_dir or ".", run_name)
        self.init_kwargs = kwargs


class JsonlTracker(KnownTracker):
    """One JSON object per line in `<logging_dir>/<run_name>/metrics.jsonl`; hyperparameters in `config.json` there.

    A line holds the `step`, the `time` in seconds since 1970, and the values. Numbers that JSON cannot hold are the
    strings `nan`, `inf` and `-inf`. A second run of the same name appends to the file.
    """

    name = "jsonl"
    requires_logging_directory = True

    @on_main_process
    def start(self) -> None:
        self.logging_dir.mkdir(parents=True, exist_ok=True)
        self.tracker = (self.logging_dir / "metrics.jsonl").open("a", encoding="utf-8", **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        text = json.dumps(_json(values), indent=2, ensure_ascii=False)
        (self.logging_dir / "config.json").write_text(text + "\n", encoding="utf-8")

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        line = {**({} if step is None else {"step": step}), "time": round(time.time(), 3), **_json(values)}
        self.tracker.write(json.dumps(line, ensure_ascii=False) + "\n")
        self.tracker.flush()  # for programs that follow the file, and to lose nothing if the process is killed

    @on_main_process
    def finish(self) -> None:
        self.tracker.close()


def _json(value: Any) -> Any:
    """Replace values that JSON does not support, such as nan, by strings; replace tensors and arrays by numbers."""
    value = _plain_values(value)
    if isinstance(value, Mapping):
        return {str(key): _json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_json(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)


# Limits of MLflow.
_LONGEST: Final = 500  # characters of a parameter's value
_BATCH: Final = 100  # parameters in a call


class MLflowTracker(KnownTracker):
    """MLflow.

    Args:
        experiment_name: the experiment that lists the runs; the environment variable `MLFLOW_EXPERIMENT_NAME` overrides
            it.
        logging_dir: not used; MLflow stores runs at `tracking_uri`.
        tracking_uri: the store of the runs. None takes the environment variable `MLFLOW_TRACKING_URI`, or MLflow's own
            default.
        nested_run: whether the run is a child of the active one.
        **kwargs: for `mlflow.start_run`: `run_id`, `run_name`, `tags`, `description`, ….
    """

    name = "mlflow"
    requires_logging_directory = False
    needs = ("mlflow",)

    def __init__(
        self,
        experiment_name: str,
        logging_dir: str | os.PathLike[str] | None = None,
        *,
        tracking_uri: str | None = None,
        nested_run: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(os.environ.get("MLFLOW_EXPERIMENT_NAME", experiment_name), logging_dir)
        self.init_kwargs = kwargs
        self.tracking_uri = tracking_uri
        self.nested_run = nested_run

    @on_main_process
    def start(self) -> None:
        import mlflow

        if self.tracking_uri is not None:
            mlflow.set_tracking_uri(self.tracking_uri)
        mlflow.set_experiment(self.run_name)
        self.tracker = self.run = mlflow.start_run(nested=self.nested_run, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the hyperparameters; values too long for MLflow are cut, and end with …."""
        import mlflow

        texts = [(name, str(value)) for name, value in values.items()]
        cut = [(name, text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…") for name, text in texts]
        for start in range(0, len(cut), _BATCH):
            mlflow.log_params(dict(cut[start : start + _BATCH]))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write measurements; strings become tags, dicts `name/inner`; `kwargs` go to `log_metrics`."""
        import mlflow

        flat = _flat(values)
        numbers = {key: float(value) for key, value in flat.items() if isinstance(value, int | float)}
        mlflow.log_metrics(numbers, step=step, **kwargs)
        for key, value in flat.items():
            if isinstance(value, str):
                mlflow.set_tag(key, value)

    @on_main_process
    def finish(self) -> None:
        import mlflow

        mlflow.end_run()


def _flat(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Flatten a dict: inner values get the name `name/inner`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat.update(_flat(value, f"{above}{key}/") if isinstance(value, Mapping) else {f"{above}{key}": value})
    return flat


class TensorBoardTracker(KnownTracker):
    """TensorBoard's event files in `<logging_dir>/<run_name>`; keyword arguments go to its `SummaryWriter`."""

    name = "tensorboard"
    requires_logging_directory = True
    needs = ("tensorboard",)

    @on_main_process
    def start(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.tracker = self.writer = SummaryWriter(str(self.logging_dir), **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the hyperparameters; values that TensorBoard does not support are written as text."""
        legal = {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in values.items()}
        self.writer.add_hparams(legal, metric_dict={}, run_name="hparams")
        self.writer.flush()

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write measurements; `kwargs` go to `add_scalar`, `add_scalars` or `add_text`. Other types are left out."""
        for key, value in values.items():
            if isinstance(value, str):
                self.writer.add_text(key, value, global_step=step, **kwargs)
            elif isinstance(value, Mapping):
                self.writer.add_scalars(key, dict(value), global_step=step, **kwargs)
            elif isinstance(value, int | float):
                self.writer.add_scalar(key, value, global_step=step, **kwargs)
        self.writer.flush()

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write batches of images by name; `kwargs` go to `add_images`."""
        for key, images in values.items():
            self.writer.add_images(key, images, global_step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        self.writer.close()


class WandBTracker(KnownTracker):
    """Weights & Biases: the project is the run's name; keyword arguments go to `wandb.init` (`mode="offline"`, …)."""

    name = "wandb"
    requires_logging_directory = False
    needs = ("wandb",)

    @on_main_process
    def start(self) -> None:
        import wandb

        self.tracker = self.run = wandb.init(project=self.run_name, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(values, allow_val_change=True)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write measurements; `kwargs` go to the run's `log`."""
        self.run.log(values, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write lists of images by name."""
        import wandb

        self.log({key: [wandb.Image(image) for image in images] for key, images in values.items()}, step, **kwargs)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Write a table from `columns` and `data`, or from a `dataframe`."""
        import wandb

        self.log({table_name: wandb.Table(columns=columns, data=data, dataframe=dataframe)}, step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        self.run.finish()


@dataclass(frozen=True)
class _OfAccelerate:
    """One of Accelerate's trackers, by its name, which is also its package's. Calling it builds the tracker.

    Keyword arguments go to Accelerate's class.
    """

    name: str
    requires_logging_directory: bool = False

    @property
    def needs(self) -> tuple[str, ...]:
        return self.name, "accelerate"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from accelerate import tracking  # type: ignore[import-untyped]

        # Accelerate's logger and its `main_process_only` need a state that Accelerate's `Accelerator` sets up. Replace
        # both: here, `Trackers` calls trackers only on the main process.
        tracking.logger = _OnceLogger(logging.getLogger(tracking.__name__), {})
        kind: Any = tracking.LOGGER_TYPE_TO_CLASS[self.name]
        return type(kind.__name__, (kind,), {"main_process_only": False})(*args, **kwargs)


class _OnceLogger(logging.LoggerAdapter):  # type: ignore[type-arg]  # generic from Python 3.11 on
    """The part of Accelerate's logger that its trackers call."""

    def warning_once(self, message: str) -> None:
        if once(_OnceLogger, message):
            self.warning(message)


Known: TypeAlias = type[GeneralTracker] | _OfAccelerate
_KNOWN: Final[tuple[Known, ...]] = (
    *(JsonlTracker, TensorBoardTracker, WandBTracker, MLflowTracker),
    _OfAccelerate("aim", requires_logging_directory=True),
    *map(_OfAccelerate, ("clearml", "comet_ml", "dvclive", "swanlab", "trackio")),
)
# The trackers that `log_with` accepts by name, including those that scripts have registered.
LOGGER_TYPE_TO_CLASS: Final[dict[str, Known]] = {kind.name: kind for kind in _KNOWN}


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Make `log_with` accept the script's own tracker class by its `name`.

    `init_trackers` calls the class with the project's name, the logging folder if the class requires one, and the
    keyword arguments in `init_kwargs` for its name.

    Raises:
        ValueError: the class is no `GeneralTracker`, or has no `name` or no `requires_logging_directory`.
    """
    is_tracker = isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)
    missing = [part for part in ("name", "requires_logging_directory") if not hasattr(tracker_class, part)]
    if not is_tracker or missing or not tracker_class.name:
        what = "lacks " + " and ".join(missing or ["a name"]) if is_tracker else "is no subclass of GeneralTracker"
        raise ValueError(
            f"register_tracker_class: {tracker_class!r} {what}.\nWrite a class with GeneralTracker as its base, with a "
            "name and requires_logging_directory as attributes."
        )
    if tracker_class.name in LOGGER_TYPE_TO_CLASS:
        _log.warning("the tracker %r is registered again: %s replaces it", tracker_class.name, tracker_class.__name__)
    LOGGER_TYPE_TO_CLASS[tracker_class.name] = tracker_class


def get_available_trackers() -> list[LoggerType]:
    """Return the trackers of this package and of Accelerate whose package is installed; `jsonl` needs none."""
    return [LoggerType(kind.name) for kind in _KNOWN if not _missing(kind)]


def choose_trackers(log_with: Any, logging_dir: str | os.PathLike[str] | None) -> list[Known | GeneralTracker]:
    """Return the trackers in `log_with`: classes for names, and the script's objects unchanged.

    Args:
        log_with: names, `LoggerType`s or `GeneralTracker`s, one or several; `all` selects every installed tracker, or
            without a `logging_dir` only those that write no files.
        logging_dir: the folder of trackers that write files.

    Raises:
        ConfigError: a name is unknown, a package is not installed, or a tracker needs a folder; the error lists all.
    """
    several = log_with if isinstance(log_with, Iterable) and not isinstance(log_with, str) else [log_with]
    given = [each for each in several if each is not None]
    names = [each if isinstance(each, GeneralTracker) else str(each) for each in given]
    if "all" in names:
        known = [str(name) for name in get_available_trackers()]
        everywhere = [
            name for name in known if logging_dir or not LOGGER_TYPE_TO_CLASS[name].requires_logging_directory
        ]
        names = [*(each for each in names if isinstance(each, GeneralTracker)), *everywhere]
    chosen = dict.fromkeys(names)
    found = [_find_problem(name, logging_dir) for name in chosen if isinstance(name, str)]
    if problems := [problem for problem in found if problem is not None]:
        raise ConfigError(problems)
    return [LOGGER_TYPE_TO_CLASS[each] if isinstance(each, str) else each for each in chosen]


def _find_problem(name: str, logging_dir: Any) -> Problem | None:
    where, kind = f"Accelerator(log_with={name!r})", LOGGER_TYPE_TO_CLASS.get(name)
    if kind is None:
        legal = ", ".join([*LOGGER_TYPE_TO_CLASS, "all"])
        return Problem(where, "", "is no tracker", f"Write {legal}, or pass an instance of your own GeneralTracker.")
    if missing := _missing(kind):
        are = "is" if len(missing) == 1 else "are"
        return Problem(where, "", f"{' and '.join(missing)} {are} not installed", f"pip install {' '.join(missing)}")
    if kind.requires_logging_directory and logging_dir is None:
        return Problem(where, "", "it writes files, and no folder is given", "Add project_dir='…'.")
    return None


def _missing(kind: Known) -> list[str]:
    """Return the modules that are not installed."""
    return [module for module in getattr(kind, "needs", ()) if importlib.util.find_spec(module) is None]


class Trackers:
    """The started trackers of one run. They act on the main process and do nothing on others.

    Args:
        project: has the folder for trackers that write files.
        rank: the rank of this process.

    Attributes:
        started: the trackers.
    """

    def __init__(self, project: ProjectConfiguration, rank: int) -> None:
        self.started: list[GeneralTracker] = []
        self._closed = ""  # the names of the trackers that `finish` has closed
        self._project = project
        self._is_main = rank == 0

    def start(
        self,
        log_with: list[Known | GeneralTracker],
        project_name: str,
        config: dict[str, Any] | None,
        init_kwargs: Mapping[str, dict[str, Any]],
    ) -> None:
        """Start the trackers of `log_with`; see `Accelerator.init_trackers`."""
        if not self._is_main:
            return
        if unknown := sorted(init_kwargs.keys() - {tracker.name for tracker in log_with}):
            _log.warning("init_trackers(init_kwargs=…) is for %s, which log_with does not name", ", ".join(unknown))
        for tracker in log_with:
            if not isinstance(tracker, GeneralTracker):
                build: Any = tracker
                folder = (self._project.logging_dir,) if tracker.requires_logging_directory else ()
                tracker = build(project_name, *folder, **init_kwargs.get(tracker.name, {}))
            tracker.start()
            self.started.append(tracker)
            if config is not None:
                tracker.store_init_configuration(config)

    def find(self, name: str, *, unwrap: bool) -> Any:
        """Return the started tracker of that name; see `Accelerator.get_tracker`."""
        if not self._is_main or not self.started:
            self._refuse_closed("get_tracker()")
            return GeneralTracker(_blank=True)
        for tracker in self.started:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker  # type: ignore[attr-defined]  # a subclass has it
        started = ", ".join(tracker.name for tracker in self.started)
        raise LoopError(
            f"no tracker {name!r} is started (started: {started}). Add the name to Accelerator(log_with=…) and call "
            "init_trackers(…)."
        )

    def log(self, values: dict[str, Any], step: int | None, log_kwargs: Mapping[str, dict[str, Any]]) -> None:
        """Write measurements to every started tracker; see `Accelerator.log`."""
        if not self.started:
            self._refuse_closed("log()")
        if self._is_main:
            plain = _plain_values(values)
            for tracker in self.started:
                tracker.log(plain, step=step, **log_kwargs.get(tracker.name, {}))

    def finish(self) -> None:
        """Close all trackers, even if closing one of them fails."""
        with ExitStack() as ends:
            for tracker in reversed(self.started):
                ends.callback(tracker.finish)
            self._closed = ", ".join(tracker.name for tracker in self.started) or self._closed
            self.started.clear()

    def _refuse_closed(self, call: str) -> None:
        """Refuse to lose measurements silently.

        Raises:
            LoopError: the trackers are closed.
        """
        if self._closed:
            raise LoopError(
                f"{call} was called after end_training(), which has closed the trackers ({self._closed}). Nothing was "
                f"written.\nCall {call} before end_training()."
            )


def _plain_values(values: Any) -> Any:
    """Replace tensors and arrays, also in dicts, by their numbers or lists of numbers."""
    if isinstance(values, Mapping):
        return {key: _plain_values(value) for key, value in values.items()}
    if isinstance(values, torch.Tensor) or (hasattr(values, "dtype") and hasattr(values, "tolist")):
        return values.item() if math.prod(values.shape) == 1 else values.tolist()
    return values
