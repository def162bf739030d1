"""Find out whether a data set or a sampler divides the data among the processes itself."""

from __future__ import annotations

import inspect
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterDataPipe
from torch.utils.data.graph import traverse_dps
from torch.utils.data.graph_settings import get_all_graph_pipes

from zero_plugin.errors import LoopError

__all__ = ["can_be_asked_for_its_shard", "count_real_samples", "divides_itself", "find_dividing_sampler"]

# Their data sets read the rank and the worker themselves, from the environment or the process group.
_DIVIDING_LIBRARIES = frozenset({"litdata", "streaming", "torchdata", "webdataset"})


def divides_itself(dataset: Any) -> bool:
    """Whether an iterable data set surely gives each process and worker its own samples."""
    if isinstance(dataset, IterDataPipe):
        pipes = get_all_graph_pipes(traverse_dps(dataset))
        return any(hasattr(pipe, "is_shardable") and pipe.is_shardable() for pipe in pipes)
    if getattr(dataset, "_distributed", None) is not None:  # datasets.distributed.split_dataset_by_node was here
        return True
    return any(kind.__module__.split(".")[0] in _DIVIDING_LIBRARIES for kind in type(dataset).__mro__)


def can_be_asked_for_its_shard(dataset: Any, world: int) -> bool:
    """Whether `dataset.shard(num_shards=world, index=rank)` gives equally many of its files to every process."""
    shard = getattr(dataset, "shard", None)
    if not callable(shard) or not {"num_shards", "index"} <= inspect.signature(shard).parameters.keys():
        return False
    pieces = getattr(dataset, "num_shards", getattr(dataset, "n_shards", None))
    return not isinstance(pieces, int) or (pieces > 0 and pieces % world == 0)


def find_dividing_sampler(loader: DataLoader[Any], rank: int, world: int) -> Any:
    """The loader's sampler or batch sampler that gives this process its own part, as DistributedSampler does; or None.

    Raises:
        LoopError: it was made for other processes than these.
    """
    for sampler in (loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None), loader.sampler):
        parts, part = getattr(sampler, "num_replicas", None), getattr(sampler, "rank", None)
        if not isinstance(parts, int) or not isinstance(part, int) or parts == 1:
            continue
        if (parts, part) != (world, rank):
            raise LoopError(
                f"prepare: the loader's {type(sampler).__name__} takes part {part} of {parts}, but this is process "
                f"{rank} of {world}; build it without num_replicas and rank, or leave it out: prepare() shares the data"
            )
        return sampler
    return None


def count_real_samples(loader: DataLoader[Any], sampler: Any) -> int | None:
    """How many of the samples that `sampler` gives this process, from the front, are not repeated to make all even.

    Raises:
        TypeError: nothing tells; only torch's own DistributedSampler in its own order is known.
    """
    if type(sampler) is not DistributedSampler or type(loader.batch_sampler) not in (BatchSampler, type(None)):
        raise TypeError(f"{type(sampler).__name__} does not tell")
    # Process r gets numbers r, r + world, … of the data set's permutation, repeated from its beginning.
    unrepeated = -(-(len(sampler.dataset) - sampler.rank) // sampler.num_replicas)  # type: ignore[arg-type]
    return min(sampler.num_samples, max(0, unrepeated))
