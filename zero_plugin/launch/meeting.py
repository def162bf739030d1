"""Before a static rendezvous every machine shows its number: who is missing, or there twice, is named."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

from zero_plugin.errors import LaunchError
from zero_plugin.launch.spec import Rendezvous
from zero_plugin.probe.network import address_towards, host_of, is_own_address

__all__ = ["meet_machines", "try_store"]

_LIMIT_S: Final = 600.0  # torch's own for a static rendezvous
_TELLS_AFTER_S: Final = 10.0
_LOOK_S: Final = 0.1
_CONNECT_S: Final = 3.0
_FAREWELL_S: Final = 1.0  # the store ends with machine 0: the others read there why


def meet_machines(meeting: Rendezvous, machines: int, *, quiet: bool = False) -> Any:
    """Wait until every machine of a static rendezvous is there, each under a number of its own.

    Args:
        meeting: the rendezvous; its option `rank` is this machine's number, `timeout` the limit in seconds.
        machines: how many there must be.
        quiet: whether nothing is said of a long wait.

    Returns:
        The store in which they met. It listens on torchrun's own port, and is to be kept as long as the run lasts.

    Raises:
        LaunchError: a machine did not come in time, another has the same number, or counts other machines.
    """
    from torch._C._distributed_c10d import PrefixStore, TCPStore
    from torch.distributed import DistError

    rank, limit_s = int(meeting.options["rank"]), float(meeting.options.get("timeout", _LIMIT_S))
    host, port = host_of(meeting.endpoint), int(meeting.endpoint.rpartition(":")[2])
    deadline = time.monotonic() + limit_s
    store = None

    def wait(what_is_missing: Callable[[], str]) -> None:
        told = quiet
        tell_at = time.monotonic() + _TELLS_AFTER_S
        while missing := what_is_missing():
            now = time.monotonic()
            if now > deadline:
                raise LaunchError(
                    f"{missing}, {limit_s:.0f} s after machine {rank} of {machines} came to {meeting.endpoint}. "
                    "Nothing was started here.\nStart the same command on every machine, each with its own "
                    "--machine_rank; --rdzv_conf timeout=SECONDS waits longer."
                )
            if now > tell_at and not told:
                print(f"machine {rank} of {machines} waits at {meeting.endpoint}: {missing}", file=sys.stderr)  # noqa: T201
                told = True
            time.sleep(_LOOK_S)

    try:
        if rank:
            wait(lambda: _why_no_answer(host, port))
            try_store(meeting, limit_s)
        server = TCPStore(host, port, None, rank == 0, timedelta(seconds=limit_s), False, multi_tenant=True)
        store = PrefixStore("zero_plugin/meeting", server)
        _show(store, rank, machines, f"{socket.gethostname()} ({address_towards(host)}, process {os.getpid()})")
        wait(lambda: _who_is_missing(store, machines))
    except (DistError, RuntimeError) as error:  # RuntimeError: what answered is no store
        strange = not rank and not is_own_address(host)
        hint = f"\nThis is machine 0, but {host} is no address of it: is --machine_rank right?" if strange else ""
        raise LaunchError(f"machine {rank} could not meet the others at {meeting.endpoint}: {error}{hint}") from error
    except LaunchError as error:
        if rank == 0 and store is not None:
            store.set("error", str(error))
            time.sleep(_FAREWELL_S)
        raise
    return server


def try_store(meeting: Rendezvous, limit_s: float) -> None:
    """Ask what listens where the machines meet whether it is a rendezvous; return if it is, or if nothing listens yet.

    Args:
        meeting: the rendezvous.
        limit_s: how long the answer may take. torch itself would wait for it without end.

    Raises:
        LaunchError: something else listens there.
    """
    from torch._C._distributed_c10d import TCPStore

    host, port = host_of(meeting.endpoint), meeting.endpoint.rpartition(":")[2]
    if not port.isdigit() or _why_no_answer(host, int(port)):
        return
    refused: list[RuntimeError] = []

    def ask() -> None:
        try:
            TCPStore(host, int(port), None, False, timedelta(seconds=limit_s), False)
        except RuntimeError as error:
            refused.append(error)

    asking = threading.Thread(target=ask, name="zero_plugin question", daemon=True)
    asking.start()
    asking.join(limit_s)
    if asking.is_alive() or refused:
        why = str(refused[0]) if refused else f"no answer within {limit_s:.0f} s"
        raise LaunchError(
            f"what listens at {meeting.endpoint} is no rendezvous of torchrun's ({why}).\n"
            "Give all machines another port (--main_process_port, --rdzv_endpoint)."
        )


def _why_no_answer(host: str, port: int) -> str:
    """Why machine 0 cannot be reached; "" if it answers."""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError as error:
        return f"machine 0 does not answer ({error.strerror or error})"
    return ""


def _show(store: Any, rank: int, machines: int, me: str) -> None:
    """Leave this machine's number for the others to see.

    Raises:
        LaunchError: another machine has the same number, or counts other machines; the others read that too.
    """
    problem = ""
    first = store.compare_set(f"machine/{rank}", "", me).decode()
    if first != me:
        problem = (
            f"two machines have the number {rank}: {first} and {me}.\n"
            f"Give each its own --machine_rank, 0 to {machines - 1}. (One that was started anew is taken back only by "
            "--rdzv_backend c10d.)"
        )
    counted = store.compare_set("machines", "", f"{machines}, as machine {rank} was told").decode()
    if not problem and int(counted.partition(",")[0]) != machines:
        problem = (
            f"the machines count differently: there are {counted}, and {machines}, as machine {rank} was told.\n"
            "Give all of them the same --num_machines."
        )
    if problem:
        store.set("error", problem)
        raise LaunchError(problem)


def _who_is_missing(store: Any, machines: int) -> str:
    """Which machines have not come; "" if all have.

    Raises:
        LaunchError: what another machine found wrong.
    """
    if store.check(["error"]):
        raise LaunchError(store.get("error").decode())
    missing = [str(number) for number in range(machines) if not store.check([f"machine/{number}"])]
    return f"machine{'s' if len(missing) > 1 else ''} {', '.join(missing)} did not come" if missing else ""
