"""The loaders under Accelerate's names, for scripts that shard their data by hand."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any

import torch
from torch.utils.data import DataLoader

from zero_plugin.data.active import DataLoaderStateMixin as DataLoaderStateMixin
from zero_plugin.data.batch_sampler import BatchSamplerShard as BatchSamplerShard
from zero_plugin.data.batch_sampler import SkipBatchSampler as SkipBatchSampler
from zero_plugin.data.batch_sampler import batches_of
from zero_plugin.data.dispatch import DataLoaderDispatcher as DataLoaderDispatcher
from zero_plugin.data.dispatch import SliceFunction
from zero_plugin.data.loader import DataLoaderAdapter as DataLoaderAdapter
from zero_plugin.data.loader import DataLoaderShard as DataLoaderShard
from zero_plugin.data.loader import SkipDataLoader as SkipDataLoader
from zero_plugin.data.loader import refuse_mesh
from zero_plugin.data.loader import skip_first_batches as skip_first_batches
from zero_plugin.data.prepare import prepare_loader
from zero_plugin.data.sharing import SeedableRandomSampler as SeedableRandomSampler
from zero_plugin.data.stream import IterableDatasetShard as IterableDatasetShard
from zero_plugin.distributed import collectives


def get_sampler(dataloader: DataLoader[Any]) -> Any:
    """Return the sampler of a loader's batches; None if the loader has no sampler, as over a stream."""
    return getattr(batches_of(dataloader), "sampler", None)


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Iterable[str | Enum] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: SliceFunction | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> DataLoaderAdapter:
    """Return a loader of this process's part; collective. `Accelerator.prepare` does the same with fewer arguments.

    Args:
        dataloader: not changed.
        device: the device of batches if `put_on_device`.
        num_processes: the number of processes that share the data; None takes all processes of the run.
        process_index: this process's index among them; None takes its rank in the run.
        split_batches: the loader's batch size counts the samples of all processes together.
        put_on_device: False leaves batches on the device that the loader creates them on.
        rng_types: `torch`, `cuda`, `generator`: random states that every process gets from process 0 at the start of
            each epoch.
        dispatch_batches: process 0 reads for all, and sends the others their parts.
        even_batches: complete the last step with the epoch's first samples: every process has a full batch.
        slice_fn_for_dispatch: divides the batches that process 0 sends; see `DataLoaderDispatcher`.
        use_seedable_sampler: shuffle by `SeedableRandomSampler` instead of torch's RandomSampler.
        data_seed: its seed; None takes torch's current one.
        non_blocking: do not wait for batches to be copied to the device.
        use_stateful_dataloader: has no effect: `state_dict` is always available.
        torch_device_mesh: None, or a mesh of data parallelism only.

    Raises:
        LoopError: see `prepare_loader`; or the mesh has more than data parallelism.
        ConfigError: `split_batches` is set, and `num_processes` does not divide the batch size.
    """
    del use_stateful_dataloader
    refuse_mesh(torch_device_mesh)
    return prepare_loader(
        dataloader,
        rank=collectives.process_index() if process_index is None else process_index,
        world_size=collectives.num_processes() if num_processes is None else num_processes,
        device=device if put_on_device else None,
        even_batches=even_batches,
        split_batches=split_batches,
        dispatch_batches=dispatch_batches,
        slice_fn=slice_fn_for_dispatch,
        use_seedable_sampler=use_seedable_sampler,
        data_seed=data_seed,
        non_blocking=non_blocking,
        rng_types=() if rng_types is None else tuple(rng_types),
    )
