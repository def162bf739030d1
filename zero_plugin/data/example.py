"""Looks at one batch of a loader without taking it from the loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from zero_plugin.data.draws import undisturbed

__all__ = ["peek_batch"]

_SAMPLES: Final = 8  # spread over the data set: where batches are padded, the longest of them counts


def peek_batch(loaders: Sequence[DataLoader[Any]]) -> Any:
    """What the training loader's `collate_fn` makes of some samples of its data set; None where they cannot be had so.

    No iterator is made, no sampler is asked, and random numbers go on as if nothing had been read. What is drawn from a
    stream would be lost to the loop, so that a stream gives None.

    Args:
        loaders: the one that trains is the first that shuffles, else the first.
    """
    if not loaders:
        return None
    loader = next((one for one in loaders if isinstance(getattr(one, "sampler", None), RandomSampler)), loaders[0])
    data: Any = loader.dataset
    if isinstance(data, IterableDataset):
        return None
    try:
        size = len(data)
        indices = sorted({step * (size - 1) // (_SAMPLES - 1) for step in range(_SAMPLES)}) if size else []
        with undisturbed():
            if loader.batch_sampler is None:  # the sampler gives whole batches
                return loader.collate_fn(data[indices])
            return loader.collate_fn([data[index] for index in indices])
    except Exception:  # noqa: BLE001 - the user's code; the data set may have other keys. The loop will meet what is wrong
        return None
