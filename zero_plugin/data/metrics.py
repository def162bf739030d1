"""Gather what an evaluation loop computed: the dataset's samples, once each."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zero_plugin.data.active import DataLoaderStateMixin
from zero_plugin.data.dispatch import is_object_column, map_tensors
from zero_plugin.distributed.collectives import announce, gather, gather_object, num_processes
from zero_plugin.errors import LoopError
from zero_plugin.tensors.nested import list_leaves, map_leaves


def gather_for_metrics(tree: Any, loader: DataLoaderStateMixin | None, use_gather_object: bool = False) -> Any:
    """The processes' per-sample values for the current batch, in the order of the single-process loader.

    Every process cuts off the samples that were repeated to make its batch even, then the rest is gathered. What a
    whole loop collects so is exactly the dataset, once each, in order.

    A list without tensors, or a plain tuple of anything but containers, holds one object per sample, and comes back as
    a list; other containers keep their shape.

    A 0-dimensional tensor or a single object is one value for the batch: gathered, there is one per batch of the
    single-process loader, since a process whose batch holds repeated samples only gives none. A mean over a batch of
    which a part is repeated counts those samples too; that is logged, and values per sample are the exact way.

    Args:
        tree: tensors with one row per sample of the batch, or 0-dimensional; lists with one object per sample; single
            objects; in any containers.
        loader: the loader that is being iterated; None where there is none.
        use_gather_object: lists of tensors, too, hold one per sample, of any sizes; and of a tensor, come the rows as a
            list.

    Raises:
        LoopError: with several processes outside a loop over a prepared loader, or the values do not have one row per
            sample, or the samples come from a sampler that may repeat some unseen: what is padding in them cannot be
            known.
    """
    if loader is None:
        if num_processes() > 1:
            raise LoopError(
                "gather_for_metrics: no prepared loader is being iterated, so nothing says which samples are repeated; "
                "call it inside `for batch in loader:` with a loader from prepare(), or use gather()"
            )
        loader = DataLoaderStateMixin()
    if loader.repeats_unseen is not None:
        raise LoopError(
            f"gather_for_metrics: the loader's {loader.repeats_unseen} shares the samples among the processes, and may "
            "repeat some to make all even; leave it out, so that prepare() shares them, or use gather()"
        )

    def is_column(node: Any) -> bool:
        return is_object_column(node, with_tensors=use_gather_object)

    own = [_cut(column, loader) for column in list_leaves(tree, is_column)]
    if use_gather_object:
        # Objects travel by pickle: a tensor on a GPU would come back on the sender's.
        on_cpu = map_tensors(lambda tensor: tensor.detach().cpu(), own)
        own = [list(column) if isinstance(column, Tensor) else column for column in on_cpu]
    tensors = iter(gather([column for column in own if isinstance(column, Tensor)]))
    objects = [column for column in own if not isinstance(column, Tensor)]
    everybodys = zip(*gather_object([objects]), strict=True) if objects else ()
    lists = iter([[value for part in parts for value in part] for parts in everybodys])
    gathered = iter([next(tensors if isinstance(column, Tensor) else lists) for column in own])
    return map_leaves(lambda _: next(gathered), tree, is_leaf=is_column)


def _cut(column: Any, loader: DataLoaderStateMixin) -> Any:
    """The real samples' part; of a value for the batch as a whole, one row or none."""
    real = loader.real_samples
    if isinstance(column, Tensor) and column.ndim:
        _check_rows(f"a tensor of shape {tuple(column.shape)}", column.shape[0], loader)
    elif isinstance(column, list | tuple):
        _check_rows(f"a {type(column).__name__} of {len(column)}", len(column), loader)
    else:
        _warn_of_repeats(loader)
        one = column.reshape(1) if isinstance(column, Tensor) else [column]
        return one[: 0 if real == 0 else 1]
    return column if real is None else column[:real]


def _warn_of_repeats(loader: DataLoaderStateMixin) -> None:
    samples, real = loader.batch_samples, loader.real_samples
    if samples is not None and real is not None and 0 < real < samples:
        announce(
            f"gather_for_metrics: a value for the batch as a whole counts {samples - real} repeated samples of "
            f"{samples}; gather one value per sample to leave them out",
            by_each=True,
        )


def _check_rows(what: str, rows: int, loader: DataLoaderStateMixin) -> None:
    """At every step, not only the last: a mistake shows in the first minute, and on all processes at once."""
    samples = loader.batch_samples
    # `loss.repeat(batch_size)` is common, also where the last batch is shorter: then its first rows are meant.
    if samples is not None and rows not in (samples, loader.batch_size):
        raise LoopError(
            f"gather_for_metrics: found {what}, the batch holds {samples} samples; give one row per sample, so that "
            "repeated samples can be cut off, or use gather() for anything else"
        )
