"""How many elements of a model each process holds: flat groups, partitions and sub-groups, with their padding."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import lru_cache
from itertools import accumulate

from zero_plugin.plan.situation import ParameterSize

__all__ = [
    "flat_elements",
    "persistent_elements",
    "sharded_elements",
    "sub_groups",
    "touched_elements",
]

Parameters = tuple[ParameterSize, ...]


def flat_elements(parameters: Parameters, processes: int) -> int:
    """Elements of the trained parameters as stages 1 and 2 lay them out: one flat tensor, cut into equal partitions.

    DeepSpeed aligns every partition to two elements, for NCCL: `nccl_start_alignment_factor`. Each further parameter
    group adds at most `2 × processes` elements.
    """
    return _ceil(_trained(parameters), 2 * processes) * 2 * processes


@lru_cache(maxsize=256)
def touched_elements(parameters: Parameters, processes: int) -> int:
    """Elements of the trained parameters of which one process' flat partition holds all or a part; of the process with
    the most.

    Gradients that are not accumulated in fp32 are kept whole for each of those parameters.
    """
    partition = flat_elements(parameters, processes) // processes
    ends = list(accumulate(p.elements for p in parameters if p.trainable for _ in range(p.count)))
    most = 0
    for start in range(0, ends[-1] if ends else 0, max(partition, 1)):
        first = bisect_right(ends, start)
        last = min(bisect_left(ends, start + partition), len(ends) - 1)
        most = max(most, ends[last] - (ends[first - 1] if first else 0))
    return most


@lru_cache(maxsize=256)
def sharded_elements(parameters: Parameters, processes: int, *, trainable: bool) -> int:
    """Elements of one process at stage 3, where each parameter is padded to a multiple of the processes by itself."""
    return sum(_ceil(p.elements, processes) * p.count for p in parameters if p.trainable == trainable)


@lru_cache(maxsize=256)
def sub_groups(parameters: Parameters, processes: int, size: int) -> tuple[int, ...]:
    """Elements of each sub-group that one process' stage-3 optimizer updates at a time: `_create_fp16_sub_groups`.

    A sub-group is closed by the parameter that brings it to `size` elements or more.
    """
    if size >= sharded_elements(parameters, processes, trainable=True):
        return (sharded_elements(parameters, processes, trainable=True),)
    groups, filled = [], 0
    for p in parameters:
        if p.trainable:
            for _ in range(p.count):
                filled += _ceil(p.elements, processes)
                if filled >= size:
                    groups.append(filled)
                    filled = 0
    return (*groups, filled) if filled else tuple(groups)


def persistent_elements(parameters: Parameters, processes: int, threshold: int) -> int:
    """Elements that stage 3 keeps whole on every device, trained or not, each parameter with its padding."""
    return sum(_ceil(p.elements, processes) * processes * p.count for p in parameters if p.elements <= threshold)


def _trained(parameters: Parameters) -> int:
    return sum(p.elements * p.count for p in parameters if p.trainable)


def _ceil(elements: int, divisor: int) -> int:
    return -(-elements // divisor)
