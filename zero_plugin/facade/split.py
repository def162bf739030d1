"""One process's share of what all hold: the same consecutive pieces, longest first, whatever is divided."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zero_plugin.errors import LoopError

__all__ = ["split"]


def split(inputs: Any, index: int, count: int, *, padded_on: torch.device | None) -> Any:
    """Share `index` of `count` of a sequence, a tensor, an array, a data set, or of each value of a dict.

    Args:
        inputs: the same on every process; the values of a dict have one length.
        index: which share.
        count: how many shares.
        padded_on: repeat the last element so that all shares have one length, with tensors on this device; None leaves
            the last shares shorter, and maybe empty.

    Raises:
        LoopError: it cannot be divided, the values of a dict differ in length, or there is no element to repeat.
    """
    length = _length(inputs)
    size, longer = divmod(length, count)
    start = index * size + min(index, longer)
    stop = start + size + (index < longer)
    if padded_on is None:
        return _take(inputs, range(start, stop), None)
    longest = size + (longer > 0)
    if not length and count > 1:
        raise LoopError("split_between_processes(apply_padding=True) got nothing: there is no element to repeat.")
    return _take(inputs, [*range(start, stop), *[length - 1] * (longest - (stop - start))], padded_on)


def _length(inputs: Any) -> int:
    if isinstance(inputs, Mapping):
        lengths = {key: _length(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise LoopError(f"split_between_processes needs values of one length in a dict, and got {lengths}.")
        return next(iter(lengths.values()), 0)
    if _taker(inputs) is None:
        raise LoopError(
            f"split_between_processes cannot divide a {type(inputs).__name__}; give a list, a tuple, a tensor, an "
            "array, a datasets.Dataset, or a dict of these."
        )
    return len(inputs)


def _take(inputs: Any, indices: Sequence[int], device: torch.device | None) -> Any:
    if isinstance(inputs, Mapping):
        return {key: _take(value, indices, device) for key, value in inputs.items()}
    taker = _taker(inputs)
    assert taker is not None, "its length was asked before"
    taken = taker(inputs, indices)
    return taken.to(device) if device is not None and isinstance(taken, Tensor) else taken


def _taker(inputs: Any) -> Callable[[Any, Sequence[int]], Any] | None:
    """What takes elements at indices out of such an object; None where nothing does."""
    if isinstance(inputs, Tensor):
        return _take_tensor if inputs.ndim else None
    if isinstance(inputs, np.ndarray):
        return _take_array if inputs.ndim else None
    if isinstance(inputs, Sequence) and not isinstance(inputs, str | bytes):
        return _take_sequence
    datasets = sys.modules.get("datasets")  # whoever holds a Dataset has imported it
    return _select if datasets is not None and isinstance(inputs, datasets.Dataset) else None


def _take_sequence(inputs: Sequence[Any], indices: Sequence[int]) -> Sequence[Any]:
    taken = [inputs[index] for index in indices]
    return tuple(taken) if isinstance(inputs, tuple) else taken


def _take_tensor(inputs: Tensor, indices: Sequence[int]) -> Tensor:
    if isinstance(indices, range):
        return inputs[indices.start : indices.stop]
    return inputs[torch.tensor(indices, dtype=torch.int64, device=inputs.device)]


def _take_array(inputs: Any, indices: Sequence[int]) -> Any:
    return inputs[np.asarray(indices, dtype=np.int64)]


def _select(inputs: Any, indices: Sequence[int]) -> Any:
    return inputs.select(indices)
