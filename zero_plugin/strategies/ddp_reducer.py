"""Control when DDP averages gradients (only in the backward that ends a window), and in which buckets.

DDP starts with one assignment of parameters to buckets. After the first backward, DDP rebuilds the buckets in the order
in which gradients arrived. A sum of three or more numbers depends on their position in a bucket, so a bitwise resume
needs the saved run's buckets from its first step on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from zero_plugin.distributed.collective_check import pass_together
from zero_plugin.errors import Foreign, LoopError
from zero_plugin.strategies.base import describe_second_gradient, route

_TORCH = "torch/lib/libtorch_cpu.so"

_WHY = "DDP averages the first one alone"
OF_BACKWARD = (
    Foreign("mark a variable ready only once", _TORCH, lambda **_: describe_second_gradient(_WHY)),
    Foreign(
        "SparseTensorImpl",
        _TORCH,
        "a gradient of the {model} is a sparse tensor, but does not come from an nn.Embedding(sparse=True): DDP "
        "averages only dense gradients and the gradients of such layers.\n"
        "Call torch.nn.functional.embedding with sparse=False, or use nn.Embedding(sparse=True).",
    ),
)
_UNUSED = Foreign(r"indices which did not receive grad for rank \d+: ([\d ]+)", _TORCH)


class DdpReducer:
    """The control of one DDP wrapper: it prepares DDP for each backward, and saves and restores the buckets.

    Args:
        ddp: the DDP wrapper of the user's module.
        no_sync: replaces `no_sync()` of `ddp`. The hook before each forward would override DDP's own.
    """

    def __init__(self, ddp: DistributedDataParallel, no_sync: Callable[[], AbstractContextManager[None]]) -> None:
        self._ddp = ddp
        self._buckets: list[list[str]] = []  # from a checkpoint, until DDP has rebuilt its own
        self._will_rebuild = self._rebuilds  # whether DDP has yet to rebuild its buckets
        # The parameters in the order of DDP's indices. A parameter that is frozen later keeps its index.
        self._names = self._trained_names()
        self._is_ready = False  # whether DDP will reduce in the next backward
        self._hook: RemovableHandle | None = None
        route(ddp, "no_sync", no_sync)

    def close(self) -> None:
        """Remove the hook of `follow` and DDP's hooks on the parameters: the script may keep the wrapper."""
        if self._hook is not None:
            self._hook.remove()
        self._ddp.reducer._remove_autograd_hooks()

    def follow(self, averages: Callable[[], bool]) -> None:
        """Ask `averages` before each forward whether the forward's backward has to average gradients."""

        def set_reduction(ddp: nn.Module, _: Any) -> None:
            if ddp is self._ddp:  # a deep copy of the model has this hook too
                if self._ddp.will_sync_module_buffers():  # type: ignore[no-untyped-call]
                    self._count_pass()
                reduces = averages()
                ddp.require_backward_grad_sync = reduces
                self._is_ready |= reduces and torch.is_grad_enabled()

        self._hook = self._ddp.register_forward_pre_hook(set_reduction)

    def prepare(self, loss: Tensor) -> None:
        """Prepare DDP for a backward of `loss` that has to average gradients."""
        self._count_pass()
        finds_unused = self._ddp.find_unused_parameters and not self._ddp.static_graph
        if not self._is_ready or finds_unused:
            # DDP prepares its reducer in a forward, for one backward. After several forwards, or if the end of the
            # window was not known yet, DDP would silently not reduce these gradients. DDP would also search for unused
            # parameters only in the outputs of the last forward, which need not be those of this loss.
            self._ddp.reducer._rebuild_buckets()
            self._ddp.reducer.prepare_for_backward([loss] if finds_unused else [])

    def finish(self, *, reached: bool) -> None:
        """Check that DDP has finished after a backward.

        Args:
            reached: whether the backward computed gradients of the module.

        Raises:
            LoopError: DDP still waits for gradients of unused parameters.
        """
        self._is_ready &= not reached
        try:
            self._ddp.reducer._check_reducer_finalized()
        except RuntimeError as error:
            raise LoopError(self._describe_unused(_UNUSED.find(error))) from None

    def average(self) -> None:
        """Average gradients that no backward has averaged: the window's last micro-batch had none. Collective."""
        self._count_pass()
        named = dict(self._ddp.module.named_parameters())
        parameters = [named[name] for name in self._names]
        has_gradient = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
        has_gradient = has_gradient.to(next(iter(parameters)).device)
        dist.all_reduce(has_gradient, dist.ReduceOp.MAX, group=self._ddp.process_group)
        for p, has_one in zip(parameters, has_gradient.tolist(), strict=True):
            if has_one:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad, group=self._ddp.process_group)
                p.grad /= self._ddp.process_group.size()

    def reset(self) -> None:
        """Build new buckets after a failed backward: an all-reduce of the old ones may still be running."""
        self._is_ready = False
        self._build(self._names)
        self._will_rebuild = self._rebuilds

    def settle(self) -> None:
        """Rebuild the buckets after a step, as DDP would in the next forward: a checkpoint needs the final buckets.

        Not inside `Join`: there, a process that has run out of batches would wait for another operation.
        """
        if self._will_rebuild and not self.is_joined:
            self._will_rebuild = not self._ddp.reducer._rebuild_buckets()

    @property
    def is_joined(self) -> bool:
        """Whether `Join` is active: a process that has run out of batches then takes part without a forward."""
        return bool(self._ddp._join_config.enable)

    def state(self) -> list[list[str]]:
        """Return the parameter names of each bucket, if known."""
        # Update the data first: otherwise they are those of the start of the last forward.
        self._ddp.logger.set_runtime_stats_and_log()  # type: ignore[union-attr]
        data: dict[str, Any] = self._ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        rebuilt = str(data.get("rebuilt_per_bucket_param_indices", ""))  # e.g. "3 2, 1 0"
        buckets = [[self._names[int(index)] for index in bucket.split()] for bucket in rebuilt.split(",") if bucket]
        return buckets or self._buckets

    def restore(self, state: list[list[str]]) -> None:
        """Use the buckets of a `state` from the next backward on, if they have this model's parameters.

        Collective; not between a forward and its backward.
        """
        order = [name for bucket in state for name in bucket]
        if not state or not self._rebuilds or sorted(order) != sorted(self._names):
            return
        # DDP has no API to set buckets. Build its reducer again with the parameters in the order in which gradients
        # arrived in the saved run, and make it rebuild its buckets in this order.
        self._build(order)
        self._ddp.reducer._push_all_rebuilt_params()
        self._ddp.reducer._rebuild_buckets()
        self._buckets, self._is_ready, self._will_rebuild = state, False, False

    @property
    def _rebuilds(self) -> bool:
        """Whether DDP rebuilds its buckets in the order in which gradients arrive."""
        return self._ddp.static_graph or not self._ddp.find_unused_parameters

    def _trained_names(self) -> list[str]:
        """Return the parameters whose gradients DDP would reduce if it was built now, in the order of indices."""
        ignored = self._ddp.parameters_to_ignore
        return [name for name, p in self._ddp.module.named_parameters() if p.requires_grad and name not in ignored]

    def _build(self, order: Sequence[str]) -> None:
        """Build DDP's reducer again, as when a copy of DDP is unpickled, with its parameters in this order."""
        ddp = self._ddp
        parameters, sparse = ddp._build_params_for_reducer()  # type: ignore[no-untyped-call]
        numbers = {name: index for index, name in enumerate(self._trained_names())}
        self._names = [name for name in order if name in numbers]  # the script has frozen the others since
        parameters = [parameters[numbers[name]] for name in self._names]
        sparse = [sparse[numbers[name]] for name in self._names]
        ddp.reducer._remove_autograd_hooks()
        names = ddp._build_debug_param_to_name_mapping(parameters)  # type: ignore[no-untyped-call]
        ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)  # type: ignore[no-untyped-call]
        for hook, state in ddp._comm_hooks:
            dist._register_comm_hook(ddp.reducer, state, hook)  # type: ignore[attr-defined]
        if ddp.static_graph:
            ddp.reducer._set_static_graph()

    def _describe_unused(self, numbers: re.Match[str] | None) -> str:
        """Return the message for a backward after which DDP waits for more gradients; torch may name their numbers."""
        names = self._names
        found = [names[i] for i in map(int, numbers[1].split()) if i < len(names)] if numbers else []
        which = ", ".join(found[:8]) + (f" and {len(found) - 8} more" if len(found) > 8 else "") or "some parameters"
        return (
            f"the loss of this backward() does not depend on {which} of the {type(self._ddp.module).__name__}: DDP "
            "still waits for their gradients, and has not averaged all others over the processes.\n"
            "If parameters are unused intentionally: Accelerator(kwargs_handlers=[DistributedDataParallelKwargs("
            "find_unused_parameters=True)]). Otherwise freeze them before prepare(), or use all of them in the loss."
        )

    def _count_pass(self) -> None:
        if not self.is_joined:
            pass_together()
