"""The tracker of Weights & Biases."""

from __future__ import annotations

from typing import Any

from zero_plugin.trackers.base import KnownTracker, on_main_process

__all__ = ["WandBTracker"]


class WandBTracker(KnownTracker):
    """Weights & Biases: the project is the run's name; keyword arguments go to `wandb.init` (`mode="offline"`, …)."""

    name = "wandb"
    requires_logging_directory = False
    needs = "wandb"

    @on_main_process
    def start(self) -> None:
        """See `GeneralTracker.start`."""
        import wandb

        self.run: Any = wandb.init(project=self.run_name, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """The run."""
        return self.run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """See `GeneralTracker.store_init_configuration`."""
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
        """See `GeneralTracker.finish`."""
        self.run.finish()
