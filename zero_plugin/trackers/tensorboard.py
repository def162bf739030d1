"""The tracker of TensorBoard: event files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero_plugin.trackers.base import KnownTracker, on_main_process

__all__ = ["TensorBoardTracker"]


class TensorBoardTracker(KnownTracker):
    """TensorBoard's event files in `<logging_dir>/<run_name>`; keyword arguments go to its `SummaryWriter`."""

    name = "tensorboard"
    requires_logging_directory = True
    needs = "tensorboard"

    @on_main_process
    def start(self) -> None:
        """See `GeneralTracker.start`."""
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
        """See `GeneralTracker.finish`."""
        self.writer.close()
