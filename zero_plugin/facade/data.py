"""What a script calls for its data: preparing loaders, exact metrics."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch.utils.data import DataLoader

from zero_plugin.config.plugins import DataLoaderConfiguration
from zero_plugin.data.active import RUNNING
from zero_plugin.data.adapter import DataLoaderAdapter
from zero_plugin.data.dispatch import SliceFunction
from zero_plugin.data.loader import skip_first_batches
from zero_plugin.data.metrics import gather_for_metrics
from zero_plugin.data.prepare import ShardIterable, prepare_loader
from zero_plugin.distributed.processes import Processes


class DataCalls:
    """The calls of the facade that concern data.

    Attributes:
        dataloader_config: how `prepare` shares loaders.
        device_placement: whether batches go to this process's device.
        rng_types: random states that every process gets from process 0 at the start of each epoch.
    """

    device: torch.device
    dataloader_config: DataLoaderConfiguration
    device_placement: bool
    rng_types: Sequence[str | Enum]
    _cut: int  # into how many micro-batches each of a loader's batches comes
    _shard_iterable: ShardIterable
    _dataloaders: list[DataLoaderAdapter]
    _processes: Processes

    @property
    def split_batches(self) -> bool:
        """Whether the loaders' batch size is that of all processes together."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether process 0 reads for all."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether an epoch's last step is completed with its first samples."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether shuffling depends on the seed and the epoch alone."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied without waiting for it."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether, after `load_state`, the coming loop goes on inside the epoch by itself."""
        return self.dataloader_config.use_stateful_dataloader

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: SliceFunction | None = None,
    ) -> DataLoaderAdapter:
        """This process's part of a DataLoader; one that is prepared already is returned as it is.

        Args:
            data_loader: over a map-style or an iterable data set.
            device_placement: put batches on this process's device; None as the Accelerator was told.
            slice_fn_for_dispatch: divides a step's batch under `dispatch_batches`; see `DataLoaderDispatcher`.

        Raises:
            ConfigError, LoopError: see `prepare_loader`.
        """
        config = self.dataloader_config
        placed = self.device_placement if device_placement is None else device_placement
        prepared = prepare_loader(
            data_loader,
            rank=self._processes.rank,
            world_size=self._processes.world_size,
            device=self.device if placed else None,
            even_batches=config.even_batches,
            split_batches=config.split_batches,
            shard_iterable=self._shard_iterable,
            dispatch_batches=config.dispatch_batches,
            slice_fn=slice_fn_for_dispatch,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
            rng_types=self.rng_types,
            cut=self._cut,
        )
        if not any(prepared is known for known in self._dataloaders):
            self._dataloaders.append(prepared)
        return prepared

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
        """A loader over the same data that begins every epoch at batch `num_batches` of this process."""
        return skip_first_batches(dataloader, num_batches)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Like `gather` in a loop over a prepared loader, without the samples repeated to make batches even."""
        return gather_for_metrics(input_data, RUNNING.current, use_gather_object)
