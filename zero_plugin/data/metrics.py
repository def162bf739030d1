"""Gather what an evaluation loop computed: the data set's samples, once each."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

from zero_plugin.collectives import gather, gather_object
from zero_plugin.data.loader import ShardedLoader
from zero_plugin.errors import LoopError
from zero_plugin.nested import list_leaves, map_leaves

__all__ = ["gather_for_metrics"]

_logger = logging.getLogger(__name__)


def gather_for_metrics(tree: Any, loader: ShardedLoader | None, use_gather_object: bool = False) -> Any:
    """The processes' per-sample values for the current batch, in the order of the single-process loader.

    Every process cuts off the samples that were repeated to make its batch even, then the rest is gathered. What a
    whole loop collects so is exactly the data set, once each, in order.

    A 0-dimensional tensor is one value for the batch: gathered, there is one per batch of the single-process loader,
    since a process whose batch holds repeated samples only gives none. A mean over a batch of which a part is repeated
    counts those samples too; that is logged, and values per sample are the exact way.

    Args:
        tree: tensors with one row per sample of the batch, or 0-dimensional, in any containers; or a list with one
            object per sample.
        loader: the loader that is being iterated; None where there is none.
        use_gather_object: gather `tree` as a list of objects even if it holds tensors.

    Raises:
        LoopError: outside a loop over a prepared loader, or the values do not have one row per sample, or the samples
            come from a sampler that may repeat some unseen: what is padding in them cannot be known.
    """
    if loader is None:
        raise LoopError(
            "gather_for_metrics: no prepared loader is being iterated, so nothing says which samples are repeated; "
            "call it inside `for batch in loader:` with a loader from prepare(), or use gather()"
        )
    if loader.repeats_unseen is not None:
        raise LoopError(
            f"gather_for_metrics: the loader's {loader.repeats_unseen} shares the samples among the processes, and may "
            "repeat some to make all even; leave it out, so that prepare() shares them, or use gather()"
        )
    leaves = list_leaves(tree)
    if not use_gather_object and any(isinstance(leaf, Tensor) for leaf in leaves):
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                _check_tensor(leaf, loader)
        return gather(map_leaves(lambda leaf: _cut(leaf, loader) if isinstance(leaf, Tensor) else leaf, tree))
    if not isinstance(tree, list):
        raise LoopError(
            f"gather_for_metrics: found a {type(tree).__name__}; give tensors with one row per sample, "
            "or a list with one object per sample"
        )
    _check_rows(f"a list of {len(tree)}", len(tree), loader)
    return gather_object(tree[: loader.real_samples])


def _cut(tensor: Tensor, loader: ShardedLoader) -> Tensor:
    real = loader.real_samples
    if tensor.ndim:
        return tensor if real is None else tensor[:real]
    return tensor.reshape(1)[: 0 if real == 0 else 1]


def _check_tensor(tensor: Tensor, loader: ShardedLoader) -> None:
    samples, real = loader.batch_samples, loader.real_samples
    if tensor.ndim:
        _check_rows(f"a tensor of shape {tuple(tensor.shape)}", tensor.shape[0], loader)
    elif samples is not None and real is not None and 0 < real < samples:
        _logger.warning(
            "gather_for_metrics: a value for the batch as a whole counts %d repeated samples of %d; "
            "gather one value per sample to leave them out",
            samples - real,
            samples,
        )


def _check_rows(what: str, rows: int, loader: ShardedLoader) -> None:
    """At every step, not only the last: a mistake shows in the first minute, and on all processes at once."""
    samples = loader.batch_samples
    # `loss.repeat(batch_size)` is common, also where the last batch is shorter: then its first rows are meant.
    if samples is not None and rows not in (samples, loader.batch_size):
        raise LoopError(
            f"gather_for_metrics: found {what}, the batch holds {samples} samples; give one row per sample, so that "
            "repeated samples can be cut off, or use gather() for anything else"
        )
