"""Which gradients DDP sums together: read from a run, and given to the one that goes on from it.

DDP begins with one division of the parameters into buckets and, after the first backward, makes another by the order in
which gradients came. A sum of three or more numbers depends on where in a bucket they lie, so that a run which goes on
bit for bit needs the buckets of the one before, from its first step on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch.distributed as dist
from torch import nn

__all__ = ["arrange_buckets", "bucket_names", "divides_anew", "number_names", "numbered_names"]

_NUMBERED: Final = "_zero_plugin_numbered_names"


def numbered_names(ddp: nn.parallel.DistributedDataParallel) -> list[str]:
    """The names of the parameters whose gradients are summed, in the order in which DDP numbers them."""
    found: list[str] | None = ddp.__dict__.get(_NUMBERED)
    if found is None:
        ignored = ddp.parameters_to_ignore
        found = [name for name, p in ddp.module.named_parameters() if p.requires_grad and name not in ignored]
    return found


def number_names(ddp: nn.parallel.DistributedDataParallel) -> None:
    """Remember `numbered_names`: a parameter that is frozen later keeps its number."""
    ddp.__dict__[_NUMBERED] = numbered_names(ddp)


def divides_anew(ddp: nn.parallel.DistributedDataParallel) -> bool:
    """Whether DDP makes its buckets anew by the order in which gradients come."""
    return ddp.static_graph or not ddp.find_unused_parameters


def bucket_names(ddp: nn.parallel.DistributedDataParallel) -> list[list[str]]:
    """The names of each bucket's parameters, once DDP has made them by the order of gradients; empty before."""
    ddp.logger.set_runtime_stats_and_log()  # type: ignore[union-attr] # else it tells where the last forward began
    told: dict[str, Any] = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    buckets = str(told.get("rebuilt_per_bucket_param_indices", ""))  # e.g. "3 2, 1 0"
    names = numbered_names(ddp)
    return [[names[int(index)] for index in bucket.split()] for bucket in buckets.split(",") if bucket]


def arrange_buckets(ddp: nn.parallel.DistributedDataParallel, buckets: Sequence[Sequence[str]]) -> bool:
    """Sum gradients in these buckets from the next backward on. Collective; not between a forward and its backward.

    Returns:
        False, and all is as before, where they are not of this model's parameters, or it keeps its first ones.
    """
    names_now = numbered_names(ddp)
    order = [name for bucket in buckets for name in bucket]
    if not divides_anew(ddp) or sorted(order) != sorted(names_now):
        return False
    parameters, sparse = ddp._build_params_for_reducer()  # type: ignore[no-untyped-call]
    ddp.__dict__.pop(_NUMBERED, None)
    numbers = {name: index for index, name in enumerate(numbered_names(ddp))}
    parameters = [parameters[numbers[name]] for name in order]
    sparse = [sparse[numbers[name]] for name in order]
    ddp.__dict__[_NUMBERED] = order
    # DDP has no way to be given buckets. Its reducer, made anew as when a copy of it is unpickled, gets the parameters
    # in the order in which their gradients came, and is told that this is how they come.
    ddp.reducer._remove_autograd_hooks()
    names = ddp._build_debug_param_to_name_mapping(parameters)  # type: ignore[no-untyped-call]
    ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)  # type: ignore[no-untyped-call]
    for hook, state in ddp._comm_hooks:
        dist._register_comm_hook(ddp.reducer, state, hook)  # type: ignore[attr-defined]
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
    ddp.reducer._push_all_rebuilt_params()
    ddp.reducer._rebuild_buckets()
    return True
