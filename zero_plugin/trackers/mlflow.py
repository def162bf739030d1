"""The tracker of MLflow."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from zero_plugin.trackers.base import KnownTracker, on_main_process

__all__ = ["MLflowTracker"]

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
        """See `GeneralTracker.start`."""
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
        """See `GeneralTracker.finish`."""
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
