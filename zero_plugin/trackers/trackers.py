"""Experiment trackers: where a run writes its measurements.

What every tracker has.

A tracker that needs no package: one JSON object per line.

The tracker of MLflow.

The tracker of TensorBoard: event files.

The tracker of Weights & Biases.
"""

from __future__ import annotations

import functools
import json
import math
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

from zero_plugin.distributed.collectives import process_index

Method = TypeVar("Method", bound=Callable[..., Any])


def on_main_process(method: Method) -> Method:
    """A tracker's method that does nothing on other processes, unless the tracker says `main_process_only = False`."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_here = not getattr(self, "main_process_only", True) or process_index() == 0
        return method(self, *args, **kwargs) if is_here else None

    return run  # type: ignore[return-value]  # of the same signature


class GeneralTracker:
    """What a tracker has; subclass it for one's own.

    A subclass has a `name`, says by `requires_logging_directory` whether it writes files, and gives by `tracker` what
    it writes through.

    Raises:
        NotImplementedError: a subclass lacks one of the three; names those.
    """

    main_process_only: ClassVar[bool] = True
    name: str
    requires_logging_directory: bool

    def __init__(self, _blank: bool = False) -> None:
        missing = [part for part in ("name", "requires_logging_directory", "tracker") if part not in dir(self)]
        if missing and not _blank:
            raise NotImplementedError(
                f"{type(self).__name__} lacks {', '.join(missing)}; a tracker has a name, says whether it "
                "requires_logging_directory, and has a property tracker."
            )

    def start(self) -> None:
        """Open the run; called once, by `init_trackers`."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the run's hyper-parameters.

        Args:
            values: numbers, booleans, strings and None by name.
        """

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write measurements.

        Args:
            values: numbers, strings, or dicts of numbers, by name.
            step: which step they are of.
            **kwargs: for what the tracker writes through.
        """

    def finish(self) -> None:
        """Close the run."""


class KnownTracker(GeneralTracker):
    """A tracker that `log_with` knows by name."""

    needs: ClassVar[str] = ""  # the module that has to be installed

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = Path(logging_dir or ".", run_name)
        self.init_kwargs = kwargs

    @property
    @abstractmethod
    def tracker(self) -> Any:
        """What it writes through."""


class JsonlTracker(KnownTracker):
    """One JSON object per line in `<logging_dir>/<run_name>/metrics.jsonl`; hyper-parameters in `config.json` there.

    A line holds the `step`, the `time` in seconds since 1970, and the values. Numbers that JSON cannot hold are the
    strings `nan`, `inf` and `-inf`. A second run of the same name appends to the file.
    """

    name = "jsonl"
    requires_logging_directory = True

    @on_main_process
    def start(self) -> None:
        self.logging_dir.mkdir(parents=True, exist_ok=True)
        self._file = (self.logging_dir / "metrics.jsonl").open("a", encoding="utf-8", **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """The open file."""
        return self._file

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        text = json.dumps(_json(values), indent=2, ensure_ascii=False)
        (self.logging_dir / "config.json").write_text(text + "\n", encoding="utf-8")

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        line = {**({} if step is None else {"step": step}), "time": round(time.time(), 3), **_json(values)}
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()  # for who follows the file, and for the end that comes without warning

    @on_main_process
    def finish(self) -> None:
        self._file.close()


def _json(value: Any) -> Any:
    """Replace what JSON does not support, such as nan or a tensor, by its string."""
    if isinstance(value, Mapping):
        return {str(key): _json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_json(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)


_LONGEST: Final = 500  # characters of a parameter's value
_BATCH: Final = 100  # parameters in a call


class MLflowTracker(KnownTracker):
    """MLflow.

    Args:
        experiment_name: where runs are listed; the environment's `MLFLOW_EXPERIMENT_NAME` comes before it.
        logging_dir: not used; MLflow keeps runs at `tracking_uri`.
        tracking_uri: where runs are kept; by default the environment's `MLFLOW_TRACKING_URI`, else MLflow's own choice.
        nested_run: whether the run is a child of the active one.
        **kwargs: for `mlflow.start_run`: `run_id`, `run_name`, `tags`, `description`, ….
    """

    name = "mlflow"
    requires_logging_directory = False
    needs = "mlflow"

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
        self.run: Any = mlflow.start_run(nested=self.nested_run, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """The active run."""
        return self.run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """See `GeneralTracker.store_init_configuration`; values too long for MLflow are cut, and end with …."""
        import mlflow

        texts = {key: _cut(str(value), _LONGEST) for key, value in values.items()}
        names = list(texts)
        for start in range(0, len(names), _BATCH):
            mlflow.log_params({name: texts[name] for name in names[start : start + _BATCH]})

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """See `GeneralTracker.log`; strings become tags, dicts `name/inner`; `kwargs` go to `log_metrics`."""
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
    """A dict's values under `name/inner`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat.update(_flat(value, f"{above}{key}/") if isinstance(value, Mapping) else {f"{above}{key}": value})
    return flat


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


class TensorBoardTracker(KnownTracker):
    """TensorBoard's event files in `<logging_dir>/<run_name>`; keyword arguments go to its `SummaryWriter`."""

    name = "tensorboard"
    requires_logging_directory = True
    needs = "tensorboard"

    @on_main_process
    def start(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(self.logging_dir), **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """The `SummaryWriter`."""
        return self.writer

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """See `GeneralTracker.store_init_configuration`; what TensorBoard cannot hold is written as text."""
        legal = {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in values.items()}
        self.writer.add_hparams(legal, metric_dict={}, run_name="hparams")
        self.writer.flush()

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """See `GeneralTracker.log`; `kwargs` go to `add_scalar`, `add_scalars` or `add_text`. The rest is left out."""
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
    needs = "wandb"

    @on_main_process
    def start(self) -> None:
        import wandb

        self.run: Any = wandb.init(project=self.run_name, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """The run."""
        return self.run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(values, allow_val_change=True)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """See `GeneralTracker.log`; `kwargs` go to the run's `log`."""
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
        """Write a table, of `columns` and `data` or of a `dataframe`."""
        import wandb

        self.log({table_name: wandb.Table(columns=columns, data=data, dataframe=dataframe)}, step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        self.run.finish()
