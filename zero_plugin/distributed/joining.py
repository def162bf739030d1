"""How the processes of a run join each other: in a store at the address that their launcher, or the user, names."""

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
_FIRST_PAUSE: Final = 10.0  # seconds, after which what is missing is logged; then twice as long each time
_LONGEST_NAP: Final = 1.0
_FIRST_NAP: Final = 0.1  # the longest while the others usually come
STORE_VISITS: Final = 1000  # that all waiting processes together may pay the store in a second
_AGENT_STORE: Final = "TORCHELASTIC_USE_AGENT_STORE"
_ENVIRONMENT: Final = "env://"
_JOINED: Final = "ZERO_PLUGIN_JOINED"  # which process has this environment's place; what it starts inherits the words

_log = logging.getLogger(__name__)


def join(init_method: str | None, rank: int, world: int, group: int, timeout: timedelta = TIMEOUT) -> Any:
    """The store of the coming process group alone, once all its processes are there.

    Args:
        init_method: where they meet, as torch takes it; None: at MASTER_ADDR and MASTER_PORT.
        rank, world: of this process.
        group: a number that all give to the coming group, and no earlier one in the same store has.
        timeout: how long they may take once this process has found the store.

    Raises:
        LaunchError: they cannot meet, or are not those of one run; it says which.
    """
    if init_method is None:
        _refuse_child(rank)
    try:
        store = _meet(init_method or _ENVIRONMENT, os.environ.get("MASTER_PORT"), rank, world, os.getpid())
        # An agent's store stays when its processes start again; any other is new with each start.
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if has_agent_store() else "0"
        store = PrefixStore(f"zero_plugin/group/{restarts}.{group}", store)
        if init_method is None:
            if has_agent_store():  # an agent has numbered its processes by itself
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
    """Let what this process starts from now on have its place in the environment."""
    os.environ.pop(_JOINED, None)


def _refuse_child(rank: int) -> None:
    """Raise in a process that a process of the run has started: with the same environment it would wait in vain."""
    process, _, place = os.environ.get(_JOINED, "").partition(" ")
    if place == _own_place(rank) and process != str(os.getpid()):
        raise LaunchError(
            f"this process was started by process {process}, which is rank {rank} of a run, and has inherited its "
            "place there: the others would not come a second time.\nStart it by `zero-plugin launch --num_processes 1`"
            ", or without RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment. If it is a worker of a "
            'DataLoader or of a pool, call Accelerator() below `if __name__ == "__main__":`.'
        )


def _own_place(rank: int) -> str:
    where = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"))
    return " ".join((str(rank), *where))


def refuse_shared_gpu(store: Any, rank: int, gpu: str) -> None:
    """Raise where another process has taken this process's GPU, before NCCL is asked: one request of each process.

    Args:
        store: of the coming group alone.
        rank: of this process.
        gpu: what no other GPU is called, on whatever machine.

    Raises:
        LaunchError: two ranks share it; with both.
    """
    mine = f"{rank} on {socket.gethostname()}"
    first = store.compare_set(f"gpu/{gpu}", "", mine).decode()
    if first != mine:
        raise LaunchError(
            f"rank {first} and rank {mine} have the same GPU ({gpu}), and NCCL takes one process for each.\n"
            "Give each a GPU of its own (srun --gpus-per-task=1, --ntasks-per-node as many as there are GPUs), and set "
            "CUDA_VISIBLE_DEVICES for all alike or for each its own; or set LOCAL_RANK, this process's number on its "
            "machine; or start fewer processes."
        )


@functools.cache
def _meet(init_method: str, port: str | None, rank: int, world: int, pid: int) -> Any:  # noqa: ARG001 - for the cache
    """The store of the launcher's processes; kept, since on its host it ends with its last reference."""
    if init_method != _ENVIRONMENT or not port or has_agent_store():
        return next(iter(rendezvous(init_method, rank, world)))[0]
    return _host_store(port, world) if rank == 0 else _find_store(port, rank, world)


def _host_store(port: str, world: int) -> Any:
    named = os.environ["MASTER_ADDR"]
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "timeout": TIMEOUT, "multi_tenant": True}
    address = own_address(named)
    if address is not None:
        with suppress(OSError):  # of a port that is taken torch tells, or shares it, if it is this process's
            file = listening_socket(address, int(port)).detach()  # torch would listen on every interface
            return TCPStore(address, int(port), world, master_listen_fd=file, **options)
    try:
        return TCPStore(named, int(port), world, **options)
    except dist.DistError as error:
        raise LaunchError(_why_not_hosted(named, port, error)) from error


def _find_store(port: str, rank: int, world: int) -> Any:
    address = os.environ["MASTER_ADDR"]
    # torch writes a page of its own for each second in which nothing listens there.
    for _ in _until(lambda: try_to_connect(address, int(port), _LONGEST_NAP) is None):
        _log.warning("rank %d of %d waits for rank 0, which does not answer at %s:%s", rank, world, address, port)
    return TCPStore(address, int(port), world, timeout=TIMEOUT, wait_for_workers=False)


def _until(happens: Callable[[], bool], timeout: timedelta = TIMEOUT, *, waiting: int = 1) -> Iterator[None]:
    """Wait until it happens, or the time is over; each time when that is worth a message, yield.

    Args:
        happens: one request.
        timeout: how long.
        waiting: how many processes may ask the same of one store.
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
    """Raise where a process with this rank has joined already, or one that counts on another number of processes."""
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
    "Give the processes of one run the same WORLD_SIZE and each its own RANK; and where another run is on this "
    "machine, give each run a MASTER_PORT of its own."
)


def _wait_for_all(store: Any, rank: int, world: int, timeout: timedelta) -> None:
    if store.add("joined", 1) == world:
        store.set("all", "")
    for message, _ in enumerate(_until(lambda: store.check(["all"]), timeout, waiting=world)):
        if store.add(f"logged/{message}", 1) == 1:  # of a thousand that wait, one
            where, missing = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", _missing(store, world)
            _log.warning("%s of WORLD_SIZE=%d did not join yet; rank %d waits at %s", missing, world, rank, where)
    if not store.check(["all"]):
        fix = (
            "Each process that the launcher starts has to come to Accelerator()."
            if has_agent_store()
            else "Start as many processes as that, on all machines together; or set WORLD_SIZE, for all alike, to the "
            "number of those that run."
        )
        late = f"{_missing(store, world)} of WORLD_SIZE={world} did not join within {timeout}.\n{fix}"
        raise of_lost_peer(LaunchError(late))


def _missing(store: Any, world: int) -> str:
    ranks = [str(rank) for rank in range(world) if not store.check([f"rank/{rank}"])]
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks[:8])}{more}"


def has_agent_store() -> bool:
    """Whether a launcher's agent hosts the store, and numbers the processes that meet there."""
    return os.environ.get(_AGENT_STORE) == "True"


def _why_not_hosted(named: str, port: str, error: Exception) -> str:
    if not is_own_address(named):
        return (
            f"rank 0 is to listen at MASTER_ADDR={named}, which is no address of this machine "
            f"({socket.gethostname()}): {error}\nSet MASTER_ADDR to the machine of rank 0, for all processes alike; or "
            "start rank 0 there."
        )
    return (
        f"rank 0 cannot listen at {named}:{port}: {error}\nAnother run has this port, or a process that is left of one "
        "(`ss -ltnp` shows it). Set MASTER_PORT to a free one, for all processes of this run alike."
    )


def _why_not_joined(init_method: str | None, rank: int, world: int, error: Exception) -> str:
    where = init_method or f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return (
        f"rank {rank} of {world} processes could not join the others at {where}: {error}\n"
        "Rank 0 must run on that machine, and the port be free there and open to the others. MASTER_ADDR and "
        "MASTER_PORT choose another place, the same for all."
    )
