"""When DDP averages gradients, and in which buckets.

When DDP averages gradients over the processes: in the backward that ends a window, and in no other.

Which gradients DDP sums together: read from a run, and given to the one that goes on from it.

DDP begins with one division of the parameters into buckets and, after the first backward, makes another by the order in
which gradients came. A sum of three or more numbers depends on where in a bucket they lie, so that a run which goes on
bit for bit needs the buckets of the one before, from its first step on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from zero_plugin.distributed.collective_check import pass_together
from zero_plugin.errors import LoopError

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


class DdpReducer:
    """What a session asks of DDP beyond forward and backward.

    Args:
        ddp: around the user's module.
        no_sync: what `no_sync()` of `ddp` is to do from now on: its own is undone by the next forward.
    """

    def __init__(self, ddp: DistributedDataParallel, no_sync: Callable[[], AbstractContextManager[None]]) -> None:
        self._ddp = ddp
        self._buckets: list[list[str]] = []  # that DDP began with, where they were given
        self._divides_anew = divides_anew(ddp)
        number_names(ddp)
        self._is_ready = False  # to reduce in the next backward
        self._hook: RemovableHandle | None = None
        _route_no_sync(ddp, no_sync)

    def close(self) -> None:
        """Ask no more before a forward."""
        if self._hook is not None:
            self._hook.remove()

    def follow(self, averages: Callable[[], bool]) -> None:
        """Ask `averages` before each forward whether the backward to come is to average."""

        def set_reduction(ddp: nn.Module, _: Any) -> None:
            if ddp is self._ddp:  # not a copy
                if self._ddp.will_sync_module_buffers():  # type: ignore[no-untyped-call]
                    self._count_pass()
                reduces = averages()
                ddp.require_backward_grad_sync = reduces
                self._is_ready |= reduces and torch.is_grad_enabled()

        self._hook = self._ddp.register_forward_pre_hook(set_reduction)

    def prepare(self, loss: Tensor) -> None:
        """A backward from `loss` is about to run, and is to average."""
        self._count_pass()
        finds_unused = self._ddp.find_unused_parameters and not self._ddp.static_graph
        if not self._is_ready or finds_unused:
            # DDP gets ready in a forward, for one backward. Where several forwards came before it, or the window's end
            # was not known yet, it would keep these gradients local without a word; and it would look for unused
            # parameters in the last forward alone, which need not be this loss's.
            self._ddp.reducer._rebuild_buckets()
            self._ddp.reducer.prepare_for_backward([loss] if finds_unused else [])

    def finish(self, *, reached: bool) -> None:
        """The backward has run.

        Args:
            reached: whether it added gradients to the module.

        Raises:
            LoopError: DDP still waits for gradients.
        """
        self._is_ready &= not reached
        try:
            self._ddp.reducer._check_reducer_finalized()
        except RuntimeError as error:
            raise LoopError(_unused_parameters(self._ddp, str(error))) from None

    def reset(self) -> None:
        """A backward has failed."""
        self._is_ready = False
        self._ddp.reducer._reset_state()  # else the next forward raises

    def settle(self) -> None:
        """After a step: make the last division into buckets.

        DDP does so in the next forward; a checkpoint that is saved before has to tell of it. Not where uneven processes
        are joined: one that has run out of batches would wait for another operation.
        """
        if self._divides_anew and not self._ddp._join_config.enable:
            self._divides_anew = not self._ddp.reducer._rebuild_buckets()

    def state(self) -> list[list[str]]:
        """The names of the parameters in each bucket, as far as known."""
        return bucket_names(self._ddp) or self._buckets

    def restore(self, state: list[list[str]]) -> None:
        """Go on with the buckets of a `state`. Collective."""
        if state and arrange_buckets(self._ddp, state):
            self._buckets, self._is_ready, self._divides_anew = state, False, False

    def _count_pass(self) -> None:
        # Where uneven processes are joined, one that has run out of batches follows the others without a forward.
        if not self._ddp._join_config.enable:
            pass_together()


def _route_no_sync(model: DistributedDataParallel, no_sync: Callable[[], AbstractContextManager[None]]) -> None:
    own = type(model).no_sync

    def routed(this: DistributedDataParallel) -> AbstractContextManager[None]:
        return no_sync() if this is model else own(this)  # a copy

    model.no_sync = MethodType(routed, model)  # type: ignore[method-assign]


def _unused_parameters(ddp: DistributedDataParallel, told: str) -> str:
    """What to say of a backward that DDP waits for more gradients after; `told` is torch's own text."""
    names = numbered_names(ddp)
    numbers = re.search(r"did not receive grad for rank \d+: ([\d ]+)", told)
    found = [names[i] for i in map(int, numbers[1].split()) if i < len(names)] if numbers else []
    which = ", ".join(found[:8]) + (f" and {len(found) - 8} more" if len(found) > 8 else "") or "some parameters"
    return (
        f"the loss of this backward() does not depend on {which} of the {type(ddp.module).__name__}: DDP waits for "
        "their gradients, so that those of the others were not averaged over the processes.\n"
        "Where parameters sit out by intention: Accelerator(kwargs_handlers=[DistributedDataParallelKwargs("
        "find_unused_parameters=True)]). Else freeze them before prepare(), or let all take part."
    )
