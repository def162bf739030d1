"""Runs replicas of a run on CPU devices of XLA, with real collectives between them: threads of one process.

On `PJRT_DEVICE=CPU` torch_xla has `CPU_NUM_DEVICES` devices in one process, and `torch_xla.launch` gives each a thread,
as on a TPU v2 or v3. Without changes, collectives between them hang (pytorch/xla issues 5005 and 9089). This module
makes these changes, in this process only:

* XLA names a collective on a CPU by its program. Threads that reach a new graph together compile two programs, whose
  collectives never meet. So the replicas take turns at a `sync`: the first compiles, and the others find that program
  in the cache.
* Parameters donated to a step make a replica's next `sync` wait for its own last step, with Python's lock held, so
  the other replicas never arrive. So no parameter is donated.
* Autocast caches cast weights for all threads together, and a thread that leaves autocast drops them. Another thread
  may then cast a tied weight a second time, which is another graph. So the cache is off.

Since TPU v4 each replica is a process. Here every thread gets its own copy of what this package and torch have once per
process: the process group, and all state of a run.

A script must `sync` equally often on every replica, and must not read a value that depends on a collective before that.
"""

from __future__ import annotations

import functools
import os
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch_xla.runtime
from torch._C._distributed_c10d import HashStore
from torch.testing._internal.distributed import multi_threaded_pg
from torch_xla._internal import pjrt

from zero_plugin.data.active import ActiveLoaders
from zero_plugin.distributed import processes
from zero_plugin.loop import state

__all__ = ["WORLD", "run_replicas"]

WORLD = 2
_SECONDS = 120.0

_VARIABLES = {
    "PJRT_DEVICE": "CPU",
    "CPU_NUM_DEVICES": str(WORLD),
    "XLA_ENABLE_PARAM_ALIASING": "0",
    "XLA_NO_SPECIAL_SCALARS": "1",  # a 0 or 1 that differs between replicas makes no other graph
}


class _PerThread:
    """A class attribute that has a separate value for every thread."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._own = make, threading.local()

    def __get__(self, *_: object) -> Any:
        if not hasattr(self._own, "value"):
            self._own.value = self._make()
        return self._own.value

    def __set__(self, _: object, value: Any) -> None:
        self._own.value = value


def run_replicas(function: Callable[[int], None]) -> None:
    """Call `function` with the rank of each replica, in a process group of all, once per process.

    A replica that fails ends the process with exit code 1.
    """
    os.environ.update(_VARIABLES)
    _separate_threads()
    _take_turns()
    run = functools.partial(_run_one, function, HashStore())
    pjrt._run_thread_per_device(0, 1, run, pjrt.initialize_multiprocess)  # as launch() does, in a separate process


def _run_one(function: Callable[[int], None], store: Any) -> None:
    rank = torch_xla.runtime.global_ordinal()
    torch.set_autocast_cache_enabled(False)  # each thread's own switch
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
        function(rank)
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - a thread's error would end nothing else
        traceback.print_exc()
        os._exit(1)  # the others wait in collectives, which cannot be interrupted


def _separate_threads() -> None:
    multi_threaded_pg._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    for shared in (state.PartialState, state.AcceleratorState, state.GradientState):
        shared._shared_state = _PerThread(dict)
    ActiveLoaders.loaders = _PerThread(list)
    processes._own = type("OwnGroup", (threading.local, processes._OwnGroup), {})()
    processes.start_watching = lambda: None  # its thread and state are the only ones of the process


def _take_turns() -> None:
    barrier = threading.Barrier(WORLD)
    mark = torch_xla._XLAC._xla_step_marker

    def mark_in_turn(device: str, devices: list[str], wait: bool = False, reset_scope: bool = True) -> None:
        own = torch_xla._XLAC._xla_get_default_device_ordinal()
        for rank in range(WORLD):
            barrier.wait(_SECONDS)
            if rank == own:
                mark(device, devices, wait=False, reset_scope=reset_scope)
        barrier.wait(_SECONDS)
        if wait:
            torch_xla._XLAC._xla_wait_device_ops(devices=[str(device)])

    torch_xla._XLAC._xla_step_marker = mark_in_turn
