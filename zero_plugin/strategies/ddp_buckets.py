"""Which gradients DDP sums together: read from a run, and given to the one that goes on from it.

DDP begins with one division of the parameters into buckets and, after the first backward, makes another by the order in
which gradients came. A sum of three or more numbers depends on where in a bucket they lie, so that a run which goes on
bit for bit needs the buckets of the one before, from its first step on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import nn

__all__ = ["arrange_buckets", "bucket_names"]


def bucket_names(ddp: nn.parallel.DistributedDataParallel) -> list[list[str]]:
    """The names of each bucket's parameters, once DDP has made them by the order of gradients; empty before."""
    ddp.logger.set_runtime_stats_and_log()  # type: ignore[union-attr] # else it tells where the last forward began
    told: dict[str, Any] = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    buckets = str(told.get("rebuilt_per_bucket_param_indices", ""))  # e.g. "3 2, 1 0"
    names = _reduced_names(ddp)
    return [[names[int(index)] for index in bucket.split()] for bucket in buckets.split(",") if bucket]


def arrange_buckets(ddp: nn.parallel.DistributedDataParallel, buckets: Sequence[Sequence[str]]) -> None:
    """Sum gradients in these buckets from the next backward on, where they are of the same parameters.

    Before a forward, and on all processes alike: it makes a new reducer.
    """
    numbers = {name: index for index, name in enumerate(_reduced_names(ddp))}
    if sorted(name for bucket in buckets for name in bucket) != sorted(numbers):
        return  # nothing was reduced there, or the model has changed
    indices = [[numbers[name] for name in bucket] for bucket in buckets]
    parameters, sparse = ddp._build_params_for_reducer()  # type: ignore[no-untyped-call]
    ddp.reducer._remove_autograd_hooks()

    def assign(_: Any, limits: Sequence[int], *__: Any) -> tuple[list[list[int]], list[int]]:
        return indices[::-1], [limits[-1]] * len(indices)  # it is going to be reversed

    # DDP has no argument for buckets; all else that belongs to making a reducer is in this method of its.
    with patch.object(dist, "_compute_bucket_assignment_by_size", assign):
        names = ddp._build_debug_param_to_name_mapping(parameters)  # type: ignore[no-untyped-call]
        ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)  # type: ignore[no-untyped-call]
    for hook, state in ddp._comm_hooks:
        dist._register_comm_hook(ddp.reducer, state, hook)  # type: ignore[attr-defined]
    if ddp.static_graph:
        ddp.reducer._set_static_graph()


def _reduced_names(ddp: nn.parallel.DistributedDataParallel) -> list[str]:
    """In the order that DDP numbers them."""
    ignored = ddp.parameters_to_ignore
    return [name for name, p in ddp.module.named_parameters() if p.requires_grad and name not in ignored]
