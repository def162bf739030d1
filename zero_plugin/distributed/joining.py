"""Joins the processes of a run through a store, at the address that the launcher or the user has set."""

from __future__ import annotations

import functools
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.rendezvous import rendezvous

from zero_plugin.errors import LaunchError, of_lost_peer
from zero_plugin.machine.network import is_own_address, listening_socket, own_address, try_to_connect

TIMEOUT: Final = timedelta(minutes=30)
_FIRST_PAUSE: Final = 10.0  # seconds until missing ranks are logged; doubles each time
_LONGEST_NAP: Final = 1.0
_FIRST_NAP: Final = 0.1  # the longest nap during the first pause, in which the others usually come
STORE_VISITS: Final = 1000  # the most requests per second that all waiting processes together send to the store
_AGENT_STORE: Final = "TORCHELASTIC_USE_AGENT_STORE"
_ENVIRONMENT: Final = "env://"
_JOINED: Final = "ZERO_PLUGIN_JOINED"  # the process that has this environment's rank; child processes inherit the value

_log = logging.getLogger(__name__)


def join(init_method: str | None, rank: int, world: int, group: int, timeout: timedelta = TIMEOUT) -> Any:
    """Wait until all processes have joined. Return the part of the store for the coming process group.

    Args:
        init_method: the rendezvous address, as torch takes it; None for MASTER_ADDR and MASTER_PORT.
        rank, world: this process's rank, and the number of processes.
        group: a number for the coming group, equal on all processes and unused by earlier groups in the same store.
        timeout: how long the others may take once this process has found the store.

    Raises:
        LaunchError: the processes cannot connect, or do not belong to one run. The message names them.
    """
    if init_method is None:
        _refuse_child(rank)
    try:
        store = _meet(init_method or _ENVIRONMENT, os.environ.get("MASTER_PORT"), rank, world, os.getpid())
        # An agent's store survives a restart of its processes. Any other store is new at each start.
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if has_agent_store() else "0"
        store = PrefixStore(f"zero_plugin/group/{restarts}.{group}", store)
        if init_method is None:
            if has_agent_store():  # the agent assigns the ranks, so duplicates are impossible
                store.set(f"rank/{rank}", "")
            else:
                _refuse_strangers(store, rank, world)
            _wait_for_all(store, rank, world, timeout)
    except dist.DistError as error:
        raise LaunchError(_why_not_joined(init_method, rank, world, error)) from error
    if init_method is None:
        os.environ[_JOINED] = f"{os.getpid()} {_own_place(rank)}"
    return store


def leave() -> None:
    """Allow processes that this one starts from now on to join with the ranks in its environment."""
    os.environ.pop(_JOINED, None)


def _refuse_child(rank: int) -> None:
    """Raise in a child of a process of the run. With the inherited environment, it would wait without success."""
    process, _, place = os.environ.get(_JOINED, "").partition(" ")
    if place == _own_place(rank) and process != str(os.getpid()):
        raise LaunchError(
            f"this process was started by process {process}, which is rank {rank} of a run, and has inherited its "
            "rank. The other ranks would not join a second time.\nStart it by `zero-plugin launch --num_processes 1`"
            ", or without RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment. If it is a worker of a "
            'DataLoader or of a pool, call Accelerator() below `if __name__ == "__main__":`.'
        )


def _own_place(rank: int) -> str:
    where = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"))
    return " ".join((str(rank), *where))


def refuse_shared_gpu(store: Any, rank: int, gpu: str) -> None:
    """Raise if another process has taken this process's GPU, before NCCL starts. Each process sends one request.

    Args:
        store: the part of the store for the coming group.
        rank: this process's rank.
        gpu: an id of the GPU that is unique over all machines.

    Raises:
        LaunchError: two ranks share the GPU. The message names both.
    """
    mine = f"{rank} on {socket.gethostname()}"
    first = store.compare_set(f"gpu/{gpu}", "", mine).decode()
    if first != mine:
        raise LaunchError(
            f"rank {first} and rank {mine} have the same GPU ({gpu}), but NCCL needs a GPU for each process.\n"
            "Give each process its own GPU (srun --gpus-per-task=1, --ntasks-per-node = number of GPUs), and set "
            "CUDA_VISIBLE_DEVICES to the same list for all or to one GPU for each. Or set LOCAL_RANK, the process's "
            "number on its machine. Or start fewer processes."
        )


@functools.cache
def _meet(init_method: str, port: str | None, rank: int, world: int, pid: int) -> Any:  # noqa: ARG001 - for the cache
    """Return the store of the launcher's processes. It is cached, because its server ends with its last reference."""
    if init_method != _ENVIRONMENT or not port or has_agent_store():
        return next(iter(rendezvous(init_method, rank, world)))[0]
    return _host_store(port, world) if rank == 0 else _find_store(port, rank, world)


def _host_store(port: str, world: int) -> Any:
    named = os.environ["MASTER_ADDR"]
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "timeout": TIMEOUT, "multi_tenant": True}
    address = own_address(named)
    if address is not None:
        with suppress(OSError):  # if the port is taken, torch below reports it, or shares a port of this process
            file = listening_socket(address, int(port)).detach()  # torch itself would listen on every interface
            return TCPStore(address, int(port), world, master_listen_fd=file, **options)
    try:
        return TCPStore(named, int(port), world, **options)
    except dist.DistError as error:
        raise LaunchError(_why_not_hosted(named, port, error)) from error


def _find_store(port: str, rank: int, world: int) -> Any:
    address = os.environ["MASTER_ADDR"]
    # Wait here first: torch writes a page of messages for each second without a listener.
    for _ in _until(lambda: try_to_connect(address, int(port), _LONGEST_NAP) is None):
        _log.warning("rank %d of %d waits for rank 0, which does not answer at %s:%s", rank, world, address, port)
    return TCPStore(address, int(port), world, timeout=TIMEOUT, wait_for_workers=False)


def _until(happens: Callable[[], bool], timeout: timedelta = TIMEOUT, *, waiting: int = 1) -> Iterator[None]:
    """Wait until `happens` returns True or the time is over. Yield each time when the caller should log a message.

    Args:
        happens: sends one request.
        timeout: the longest time to wait.
        waiting: how many processes may send the same requests to one store.
    """
    began, pause, nap = time.monotonic(), _FIRST_PAUSE, max(0.01, waiting / STORE_VISITS / 10)
    while not happens() and (waited := time.monotonic() - began) < timeout.total_seconds():
        if waited > pause:
            yield
            pause *= 2
        time.sleep(nap)
        longest = _LONGEST_NAP if waited > _FIRST_PAUSE else _FIRST_NAP
        nap = min(nap * 1.2, max(longest, waiting / STORE_VISITS))


def _refuse_strangers(store: Any, rank: int, world: int) -> None:
    """Raise if a process with this rank, or one with another world size, has joined already."""
    who = f"{socket.gethostname()}, process {os.getpid()}"
    first = store.compare_set("world_size", "", f"WORLD_SIZE={world} (rank {rank} on {who})").decode()
    if first.split(" ")[0] != f"WORLD_SIZE={world}":
        raise LaunchError(
            f"rank {rank} has WORLD_SIZE={world}, but {first.partition(' ')[2].strip('()')} has {first.split(' ')[0]}."
            f"\n{_ONE_RUN}"
        )
    other = store.compare_set(f"rank/{rank}", "", who).decode()
    if other != who:
        raise LaunchError(f"two processes have RANK={rank}: {other} has joined already, and this is {who}.\n{_ONE_RUN}")


_ONE_RUN: Final = (
    "Give the processes of one run the same WORLD_SIZE, and each its own RANK. If another run is on this machine, give "
    "each run its own MASTER_PORT."
)


def _wait_for_all(store: Any, rank: int, world: int, timeout: timedelta) -> None:
    if store.add("joined", 1) == world:
        store.set("all", "")
    for message, _ in enumerate(_until(lambda: store.check(["all"]), timeout, waiting=world)):
        if store.add(f"logged/{message}", 1) == 1:  # only one of the waiting processes logs
            where, missing = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", _missing(store, world)
            _log.warning("%s of WORLD_SIZE=%d did not join yet; rank %d waits at %s", missing, world, rank, where)
    if not store.check(["all"]):
        fix = (
            "Each process that the launcher starts has to call Accelerator()."
            if has_agent_store()
            else "Start as many processes, on all machines together. Or set WORLD_SIZE to the number of running "
            "processes, the same for all."
        )
        late = f"{_missing(store, world)} of WORLD_SIZE={world} did not join within {timeout}.\n{fix}"
        raise of_lost_peer(LaunchError(late))


def _missing(store: Any, world: int) -> str:
    ranks = [str(rank) for rank in range(world) if not store.check([f"rank/{rank}"])]
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks[:8])}{more}"


def has_agent_store() -> bool:
    """Return whether a launcher's agent hosts the store and assigns the ranks."""
    return os.environ.get(_AGENT_STORE) == "True"


def _why_not_hosted(named: str, port: str, error: Exception) -> str:
    if not is_own_address(named):
        return (
            f"rank 0 is to listen at MASTER_ADDR={named}, which is not an address of this machine "
            f"({socket.gethostname()}): {error}\nSet MASTER_ADDR to the machine of rank 0, the same for all processes. "
            "Or start rank 0 there."
        )
    return (
        f"rank 0 cannot listen at {named}:{port}: {error}\nAnother run, or a leftover process of one, has this port "
        "(`ss -ltnp` shows it). Set MASTER_PORT to a free port, the same for all processes of this run."
    )


def _why_not_joined(init_method: str | None, rank: int, world: int, error: Exception) -> str:
    where = init_method or f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return (
        f"rank {rank} of {world} processes could not join the others at {where}: {error}\n"
        "Rank 0 must run on that machine, and the port must be free there and open to the others. MASTER_ADDR and "
        "MASTER_PORT choose another place, the same for all."
    )
