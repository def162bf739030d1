"""What a script calls for its data: preparing loaders, exact metrics."""

from __future__ import annotations

from typing import Any

import torch

from zero_plugin.data.loader import ActiveLoaders, ShardedLoader
from zero_plugin.data.metrics import gather_for_metrics
from zero_plugin.data.prepare import ShardIterable, prepare_loader
from zero_plugin.strategies.processes import Processes

__all__ = ["DataCalls"]


class DataCalls:
    """The calls of the facade that concern data."""

    device: torch.device
    split_batches: bool
    _even_batches: bool
    _shard_iterable: ShardIterable
    _loaders: ActiveLoaders
    _processes: Processes

    def prepare_data_loader(self, loader: Any) -> ShardedLoader:
        """This process's part of a DataLoader, with batches on this process's device."""
        return prepare_loader(
            loader,
            rank=self._processes.rank,
            world_size=self._processes.world_size,
            device=self.device,
            even_batches=self._even_batches,
            split_batches=self.split_batches,
            shard_iterable=self._shard_iterable,
            active=self._loaders,
        )

    def gather_for_metrics(self, tree: Any, use_gather_object: bool = False) -> Any:
        """Like `gather` in a loop over a prepared loader, without the samples repeated to make batches even."""
        return gather_for_metrics(tree, self._loaders.current, use_gather_object)
