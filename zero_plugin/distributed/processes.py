"""The processes of a run: rank, device and process group, from the environment that a launcher has set.

Also a script's calls that concern processes: ranks, order of execution, and a process's share of common inputs.
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from zero_plugin.config.choices import DistributedType
from zero_plugin.distributed.collective_check import collective, end_watching, start_watching
from zero_plugin.distributed.joining import TIMEOUT, has_agent_store, join, leave, refuse_shared_gpu
from zero_plugin.distributed.messages import show_messages, working
from zero_plugin.distributed.process_end import call_at_exit
from zero_plugin.errors import Foreign, LaunchError, LoopError, raise_clearer
from zero_plugin.machine.network import OWN_ADDRESS, network_variables
from zero_plugin.machine.process_place import find_local_rank, find_place, own_gpu, variables_while
from zero_plugin.machine.xla_runtime import (
    check_world_size,
    find_tpu,
    import_torch_xla,
    refuse_threads,
    start_runtime,
)

_COORDINATES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LATE_DEVICE = Foreign(
    "device_ready_queues_",  # in an assertion of torch/csrc/autograd/engine.cpp
    "torch/lib/libtorch_cpu.so",
    "a backward() ran before the XLA runtime was started. torch's autograd engine counted the devices then, and does "
    "not serve this one.\nMake the Accelerator, or PartialState(), before the first backward().",
    becomes=LaunchError,
)
_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}  # environment of a group of one process


@dataclass(frozen=True, slots=True)
class Processes:
    """This process among its peers.

    Attributes:
        rank, local_rank: index among all processes, and on this machine.
        world_size: number of processes.
        device: the device on which this process computes.
        shared_by: number of consecutive processes that share samples: each has a part of every sequence.
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    shared_by: int = 1

    @property
    def data_parallel_size(self) -> int:
        """Number of processes, or groups of processes with shared samples, that get different samples."""
        return self.world_size // self.shared_by

    @property
    def data_parallel_rank(self) -> int:
        """This process's index in `data_parallel_size`."""
        return self.rank // self.shared_by

    @property
    def distributed_type(self) -> DistributedType:
        """The distributed type without regard to a strategy."""
        if self.device.type == "xla":
            return DistributedType.XLA
        if self.world_size == 1:
            return DistributedType.NO
        return DistributedType.MULTI_GPU if self.device.type == "cuda" else DistributedType.MULTI_CPU

    def counted_by_gpu(self) -> AbstractContextManager[None]:
        """Set LOCAL_RANK inside the context to the index of this process's GPU, which DeepSpeed expects there."""
        # DeepSpeed requires that both variables are equal.
        names = ("LOCAL_RANK", *filter(os.environ.__contains__, ("OMPI_COMM_WORLD_LOCAL_RANK",)))
        number = self.device.index if self.device.type == "cuda" else self.local_rank
        return variables_while(dict.fromkeys(names, str(number)))

    @property
    def backend(self) -> str | None:
        """The backend for tensors of this process's device, e.g. `nccl`; None with one process."""
        if self.world_size == 1 or not dist.is_initialized():
            return None
        backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
        return backends.get(self.device.type, next(iter(backends.values())))

    @collective("wait_for_everyone")
    def barrier(self) -> None:
        """Wait for every process.

        Raises:
            LoopError: the process group has ended.
        """
        if self.world_size > 1:
            if not dist.is_initialized():
                raise LoopError("end_training() has ended the process group; there are no processes to wait for.")
            over_nccl = self.device.type == "cuda" and "nccl" in dist.get_backend()
            dist.barrier(device_ids=[self.device.index or 0] if over_nccl else None)

    def hold(self, end: Callable[[], None]) -> None:
        """Keep the process group for a run, until `stop` is called with the same `end`.

        Args:
            end: ends the run.
        """
        _own.holders.append(end)

    def stop(self, end: Callable[[], None], destroy_group: Callable[[], None]) -> None:
        """End the process group, if this package made it and no other run needs it.

        Close sessions first: gloo aborts at exit while DDP or an engine holds the group.

        Args:
            end: the function given to `hold`.
            destroy_group: called when the group ends. It ends the group, or drops caches of a group that has ended.
        """
        if end in _own.holders:
            _own.holders.remove(end)
        _own.destroyers.append(destroy_group)
        if not _own.holders:
            _own.end()

    def end_group(self) -> None:
        """End all runs on these processes, then their process group, even if the script made it. Collective."""
        _own.end_with_runs()
        if dist.is_initialized():
            end_watching()
            dist.destroy_process_group()


class _OwnGroup:
    """The default process group, if this package made it.

    Attributes:
        group: the process group; None if this package has made none or has ended it.
        holders: for each run that has not ended, the function that ends it.
        destroyers: for each run that has ended, its function that ends the group.
        own_variables: environment variables that this package has set for a group of one process; empty if a launcher
            has described the group.
        on_xla: whether its processes compute on XLA devices.
    """

    def __init__(self) -> None:
        self.group: Any = None
        self.holders: list[Callable[[], None]] = []
        self.destroyers: list[Callable[[], None]] = []
        self.own_variables: dict[str, str] = {}
        self.on_xla = False
        self._groups = 0
        self._at_exit: Callable[[], None] | None = None

    @property
    def lives(self) -> bool:
        """Whether the group exists and is the default process group."""
        return self.group is not None and dist.is_initialized() and dist.group.WORLD is self.group

    def make(self, backend: str, device: torch.device, init_method: str | None, timeout: timedelta) -> None:
        """Make the process group that the environment describes."""
        if self.group is not None:  # the script has ended the previous group by torch's own call
            self._forget_environment()
        if init_method is not None or _is_launched():
            rank, world = (int(os.environ.get(name, "-1")) for name in ("RANK", "WORLD_SIZE"))
            os.environ.update(_choose_network())
            # Groups follow each other in the same store. The number keeps a group from reading an older group's keys.
            store = join(init_method, rank, world, self._groups + 1, timeout)
            self._groups += 1
            if device.type == "cuda" and "nccl" in backend:
                refuse_shared_gpu(store, rank, str(torch.cuda.get_device_properties(device).uuid))
            dist.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=world,
                timeout=timeout,
                device_id=device if device.type == "cuda" else None,
            )
        else:
            # DeepSpeed reads these even for one process, and would look for MPI without them. A store in memory needs
            # no port, so any number of single-process runs can share a machine.
            self.own_variables = {**_ALONE, **_choose_network()}
            os.environ.update(self.own_variables)
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        self.group, self.holders, self.destroyers = dist.group.WORLD, [], []

    def end_at_exit(self) -> None:
        """Register the group's end for the exit of this process, in the reverse order of starts."""
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
        self._at_exit = call_at_exit(self._end_left_over)

    def end(self) -> None:
        """End the process group, if this package made it and it still exists. Collective."""
        # Closed engines and DDP are in reference cycles that hold the group, even if the script made the group and will
        # end it. Without this collection, one run in eight with four stage-3 engines aborted at exit; with it, none of
        # 32 did.
        gc.collect()
        if self.lives and dist.get_world_size() > 1:
            dist.barrier()
        # The script may have ended the group by torch's own call, which does not clear DeepSpeed's caches of groups.
        if self.lives or not dist.is_initialized():
            end_watching()
            for destroy in self.destroyers:
                destroy()
            if dist.is_initialized():
                dist.destroy_process_group()
            self._forget_environment()
        self.group, self.destroyers = None, []

    def end_with_runs(self) -> None:
        """End all runs that hold the process group, then the group. Collective."""
        for end in reversed(tuple(self.holders)):
            end()
        self.end()

    def _forget_environment(self) -> None:
        leave()
        for name in self.own_variables:
            os.environ.pop(name, None)
        self.own_variables = {}

    def _end_left_over(self) -> None:
        """End a group that no run has ended: the script used only `PartialState`."""
        if self.lives:
            collective("end_training", waits_for_all=True)(self.end)()


_own = _OwnGroup()


@contextmanager
def process_group() -> Iterator[None]:
    """Provide a process group inside: the run's, or one of this process alone if the script has ended the run's."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def start_processes(
    *,
    cpu: bool,
    xla: bool | None = None,
    backend: str | None = None,
    timeout: timedelta | None = None,
    init_method: str | None = None,
) -> Processes:
    """Join the process group that the launcher's environment describes; without a launcher, a group of one.

    A task of `srun` or `mpirun` gets its rank from their variables. An existing group is used unchanged. Even one
    process has a group, since a ZeRO engine needs one.

    Args:
        cpu: compute on the CPU even if a GPU is available.
        xla: compute on an XLA device, with gloo between the processes. By default, this is done if the processes use
            XLA already, or if a TPU is available.
        backend: `nccl` or `gloo`. The default on GPUs is NCCL with gloo for CPU tensors, and gloo on CPUs.
        timeout: how long a collective may wait; 30 minutes by default.
        init_method: the rendezvous address, as torch takes it; by default the launcher's.

    Raises:
        LaunchError: the environment describes a process group only in part, or the processes cannot connect; also see
            `find_replica`.
        MachineError: see `find_replica`.
    """
    show_messages(quiet=os.environ.get("RANK", "0") != "0")
    if _finds_xla(cpu) if xla is None else xla:
        return _start_replica(timeout or TIMEOUT)
    if dist.is_initialized():
        local_rank = find_local_rank(dist.get_rank(), dist.get_world_size(), os.environ)
    else:
        place = find_place(os.environ)
        if place is not None and (place.world_size > 1 or _is_launched()):
            os.environ.update(place.environment(os.environ) if init_method is None else place.numbers())
            _share_cores(place.local_size)
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    cuda = torch.cuda.is_available() and not cpu
    device = torch.device("cpu")
    if cuda:
        visible = torch.cuda.device_count()
        gpu = own_gpu(local_rank, visible, os.environ)
        if gpu is None:
            raise LaunchError(
                f"the process of local rank {local_rank} has no GPU: this machine has {visible}.\n"
                f"Start at most {visible} processes on this machine (--num_processes), or add --cpu."
            )
        device = torch.device("cuda", gpu)
        torch.cuda.set_device(device)
        if _own.lives and not _own.holders and _own.own_variables and "cuda" not in dist.get_backend_config():
            _own.end()  # a leftover group of one process that was made for the CPU
    if not dist.is_initialized():
        if cuda and backend in (None, "nccl"):  # gloo carries CPU tensors, which NCCL cannot send
            backend = "cpu:gloo,cuda:nccl"
        backend = backend or "gloo"
        with working("waiting for the other processes of the run"):
            _own.make(backend, device, init_method, timeout or TIMEOUT)
        start_watching()  # first: exit functions run in reverse order, and the watch must outlive the group
        _own.end_at_exit()
    start_watching()
    return Processes(dist.get_rank(), local_rank, dist.get_world_size(), device)


def end_group_of_one() -> bool:
    """End the runs of this process and their group, if this package made it for one process. Return whether it did."""
    if not _own.lives or dist.get_world_size() > 1:
        return False
    _own.end_with_runs()
    return True


def _finds_xla(cpu: bool) -> bool:
    return not cpu and (_own.on_xla or (not torch.cuda.is_available() and bool(find_tpu(os.environ))))


def _start_replica(timeout: timedelta) -> Processes:
    replica, on_this_machine = find_replica()
    if not dist.is_initialized():
        os.environ.update(describe_group(replica, on_this_machine))
        _own.make("gloo", replica.device, None, timeout)
        _own.end_at_exit()
    _own.on_xla = True
    check_world_size(replica.world_size, {"WORLD_SIZE": str(dist.get_world_size())})
    start_watching()
    return replace(replica, rank=dist.get_rank())


def find_replica() -> tuple[Processes, int]:
    """Start the XLA runtime. Return this process among those that it connects, and their number on this machine.

    Raises:
        LaunchError: the runtime has no TPU, connects fewer processes than were started, or runs several in threads; or
            this process has run a `backward` before.
        MachineError: torch_xla or the runtime does not work here.
    """
    start_runtime()  # first, since an import of torch_xla sets PJRT_DEVICE if it is unset
    torch_xla = import_torch_xla()
    runtime = torch_xla.runtime
    world_size = runtime.world_size()
    check_world_size(world_size)
    refuse_threads(world_size)
    torch_xla.manual_seed(torch.initial_seed())  # an earlier `set_seed` could not seed torch_xla
    device = torch_xla.device()
    try:
        torch.zeros((), device=device, requires_grad=True).backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise_clearer(error, [_LATE_DEVICE])
        raise  # an error of the compiler, or out of memory
    if world_size == 1:
        return Processes(0, 0, 1, device), 1
    place = Processes(runtime.global_ordinal(), runtime.local_ordinal(), world_size, device)
    return place, runtime.local_device_count()


def describe_group(replica: Processes, on_this_machine: int) -> dict[str, str]:
    """Return the variables that describe a process group of XLA replicas; none for one replica.

    Without an address from the launcher, the address is that of torch_xla's own process groups. If the launcher only
    knows its own machine, its address is removed from the environment.

    Args:
        replica: this process.
        on_this_machine: the number of replicas on this machine.
    """
    if replica.world_size == 1:
        return {}
    if replica.world_size > on_this_machine and has_agent_store():
        for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):  # these differ between machines
            os.environ.pop(name, None)
    runtime = import_torch_xla().runtime
    address = os.environ.get("MASTER_ADDR")
    return {
        "RANK": str(replica.rank),
        "LOCAL_RANK": str(replica.local_rank),
        "WORLD_SIZE": str(replica.world_size),
        "LOCAL_WORLD_SIZE": str(on_this_machine),
        "MASTER_ADDR": address or (runtime.get_master_ip() if runtime.device_type() == "TPU" else OWN_ADDRESS),
        "MASTER_PORT": os.environ.get("MASTER_PORT", "12355"),
    }


def _share_cores(processes: int | None) -> None:
    """Use a share of this machine's cores, unless the scheduler has bound this process or OMP_NUM_THREADS is set."""
    if processes is not None and "OMP_NUM_THREADS" not in os.environ and hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
        if cores == os.cpu_count():
            torch.set_num_threads(max(1, cores // processes))


def _choose_network() -> dict[str, str]:
    """Return the variables that choose the network interface of gloo and NCCL, unless they are set already.

    On one machine, the interface is loopback. On several, it is the one that leads to rank 0's machine: without a
    variable, gloo uses the interface of this machine's name. NCCL finds one without help.
    """
    alone = os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1")
    variables = network_variables(OWN_ADDRESS if alone else os.environ.get("MASTER_ADDR", ""), nccl=alone)
    return {name: value for name, value in variables.items() if name not in os.environ}


def _is_launched() -> bool:
    """Return whether the environment describes a process group, set by a launcher or from `find_place`."""
    return all(name in os.environ for name in _COORDINATES)


# ---- a script's calls that concern processes -------------------------------------------------------------------------


def split(inputs: Any, index: int, count: int, *, padded_on: torch.device | None) -> Any:
    """Return part `index` of `count` of a sequence, a tensor, an array, a dataset, or of each value of a dict.

    Args:
        inputs: the inputs, equal on every process. The values of a dict have one length.
        index: the index of the part.
        count: the number of parts.
        padded_on: repeat the last element until all parts have one length, and move tensors to this device. None leaves
            the last parts shorter or empty.

    Raises:
        LoopError: the inputs cannot be divided, the values of a dict differ in length, or no element can be repeated.
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
    datasets = sys.modules.get("datasets")  # a script that has a Dataset has imported it
    if (
        (isinstance(inputs, Tensor | np.ndarray) and inputs.ndim)
        or (isinstance(inputs, Sequence) and not isinstance(inputs, str | bytes))
        or (datasets is not None and isinstance(inputs, datasets.Dataset))
    ):
        return len(inputs)
    raise LoopError(
        f"split_between_processes cannot divide a {type(inputs).__name__}; give a list, a tuple, a tensor, an "
        "array, a datasets.Dataset, or a dict of these."
    )


def _take(inputs: Any, indices: Sequence[int], device: torch.device | None) -> Any:
    if isinstance(inputs, Mapping):
        return {key: _take(value, indices, device) for key, value in inputs.items()}
    if isinstance(inputs, Tensor):
        if isinstance(indices, range):
            return inputs[indices.start : indices.stop]
        return inputs[torch.tensor(indices, dtype=torch.int64, device=inputs.device)].to(device)
    if isinstance(inputs, np.ndarray):
        return inputs[np.asarray(indices, dtype=np.int64)]
    if isinstance(inputs, Sequence):
        taken = [inputs[index] for index in indices]
        return tuple(taken) if isinstance(inputs, tuple) else taken
    return inputs.select(indices)


Function = Callable[..., Any]


class ProcessCalls:
    """The calls of `Accelerator`, `PartialState` and `AcceleratorState` that concern processes.

    Attributes:
        device: the device on which this process computes.
        distributed_type: how the processes work together.
    """

    device: torch.device
    distributed_type: DistributedType
    _processes: Processes

    @property
    def num_processes(self) -> int:
        """Number of processes of the run."""
        return self._processes.world_size

    @property
    def process_index(self) -> int:
        """Index of this process among all processes, from 0."""
        return self._processes.rank

    @property
    def local_process_index(self) -> int:
        """Index of this process on its machine, from 0."""
        return self._processes.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is process 0."""
        return self._processes.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is its machine's process 0."""
        return self._processes.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last process."""
        return self._processes.rank == self._processes.world_size - 1

    @property
    def use_distributed(self) -> bool:
        """Whether several processes run."""
        return self._processes.world_size > 1

    @property
    def multi_device(self) -> bool:
        """Whether several GPUs compute, without ZeRO."""
        return self.use_distributed and self.distributed_type is DistributedType.MULTI_GPU

    def wait_for_everyone(self) -> None:
        """Wait until every process has reached this call."""
        self._processes.barrier()

    def print(self, *values: Any, **kwargs: Any) -> None:
        """Print values, once on every machine."""
        if self.is_local_main_process:
            print(*values, **kwargs)  # noqa: T201 - the purpose of this method

    # ---- one after another -----------------------------------------------------------------------------------------

    def main_process_first(self) -> AbstractContextManager[None]:
        """Run the code inside on the main process first, then on all others in parallel. Collective.

        If the code raises on the main process, the others still run it.
        """
        return self._goes_first(self.is_main_process, "main_process_first")

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Run the code inside on each machine's main process first, then on all others in parallel. Collective.

        If the code raises on a machine's main process, the others still run it.
        """
        return self._goes_first(self.is_local_main_process, "local_main_process_first")

    @contextmanager
    def _goes_first(self, first: bool, call: str) -> Iterator[None]:
        meet = collective(call)(self._processes.barrier)
        if not first:
            meet()
        try:
            yield
        except Exception:  # not BaseException: a process that is interrupted or exits does not wait for the others
            if first:
                meet()
            raise
        if first:
            meet()

    # ---- functions that some processes run -------------------------------------------------------------------------

    def on_main_process(self, function: Function | None = None) -> Function:
        """Decorate a function to run on the main process only. It returns None on the others."""
        return self._on(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Function | None = None) -> Function:
        """Decorate a function to run on each machine's main process only. It returns None on the others."""
        return self._on(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Function | None = None) -> Function:
        """Decorate a function to run on the last process only. It returns None on the others."""
        return self._on(lambda: self.is_last_process, function)

    def on_process(self, function: Function | None = None, process_index: int | None = None) -> Function:
        """Decorate a function to run on process `process_index` only, or on the only process of a run."""
        return self._on(lambda: not self.use_distributed or self.process_index == process_index, function)

    def on_local_process(self, function: Function | None = None, local_process_index: int | None = None) -> Function:
        """Decorate a function to run on each machine's process `local_process_index`, or on the only process."""
        return self._on(lambda: not self.use_distributed or self.local_process_index == local_process_index, function)

    def _on(self, here: Callable[[], bool], function: Function | None) -> Function:
        if function is None:  # @accelerator.on_process(process_index=2), or @accelerator.on_main_process()
            return functools.partial(self._on, here)

        @functools.wraps(function)
        def run_here(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if here() else None

        return run_here

    # ---- dividing --------------------------------------------------------------------------------------------------

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Yield this process's consecutive share of `inputs`. Not collective.

        Args:
            inputs: a list, tuple or other sequence, a tensor or array (by its first dimension), a `datasets.Dataset`,
                or a dict of these, all of one length. It must be equal on every process. Strings are not divided.
            apply_padding: repeat the last element in shorter shares, so results can be gathered. Tensors are then on
                this process's device.

        Raises:
            LoopError: the inputs cannot be divided, or the values of a dict differ in length.
        """
        yield split(inputs, self.process_index, self.num_processes, padded_on=self.device if apply_padding else None)


def is_registered(group: dist.ProcessGroup) -> bool:
    """Return whether a process group still exists: `destroy_process_group` has not ended it."""
    if not dist.is_initialized():
        return False
    try:
        dist.get_process_group_ranks(group)
    except KeyError:
        return False
    return True
