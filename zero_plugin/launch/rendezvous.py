"""Where the launchers of a run meet: a rendezvous of one machine, and what several machines check before torchrun's.

torch's own rendezvous would let others in: the store of `c10d` listens on every interface, and who writes a pickle
into it has the launcher run code; that of `static` listens on every interface too, and is not renewed for a restart. A
launch on one machine has a store that listens on loopback alone, and nothing in it is a pickle.

On several machines the launchers meet before torchrun's rendezvous (the pre-rendezvous), so that missing machines,
duplicate ranks and strangers are named; later they watch that machine 0 can be reached.

`python -m zero_plugin.launch.rendezvous ARGUMENT…` is torchrun with the rendezvous of one machine beside its own.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from zero_plugin.distributed.process_end import end_process, run_in_threads
from zero_plugin.errors import LaunchError
from zero_plugin.launch.spec import LOOPBACK, Rendezvous
from zero_plugin.machine.network import (
    OWN_ADDRESS,
    address_towards,
    host_of,
    is_own_address,
    listening_socket,
    own_address,
    try_to_connect,
)

_logger = logging.getLogger(__name__)

_LIMIT_S: Final = 600.0  # torch's own for a static rendezvous
_ANSWERS_WITHIN_S: Final = 60.0  # torch's own for one answer of the store
_LOGS_AFTER_S: Final = 10.0
_LOOK_S: Final = 0.1
_CONNECT_S: Final = 3.0
_FAREWELL_S: Final = 5.0  # the store ends with machine 0: the others have so long to read there why
_MET: Final = "met"
_EXPOSED: Final = (
    "rdzv_backend: c10d: the rendezvous at %s listens on every network of its machine, and who can reach it can have "
    "the launchers run code. Let in the machines of the run alone."
)
_CONTACT_LOOK_S: Final = 2.0
_STOPS_WITHIN_S: Final = 10.0
# A machine that refuses is there: its launcher has ended, which torchrun notices, or need not.
_THERE: Final = (errno.ECONNREFUSED, errno.ECONNRESET)


class OneMachineRendezvous(StaticTCPRendezvous):
    """A rendezvous of one launcher, with itself: torch's static one, but for its stores.

    What torchrun's agent writes for other agents stays in the memory of this process. Its workers get a TCP store,
    which is another one with each start of them: in one store for all, those of a restart would read the addresses of
    processes that are gone.

    Args:
        parameters: torchrun's, of which `endpoint` says where the store listens; port 0 takes a free one.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        host, port = host_of(parameters.endpoint), int(parameters.endpoint.rpartition(":")[2])
        super().__init__(host, port, rank=0, world_size=1, run_id=parameters.run_id, timeout=int(_LIMIT_S))

    def get_backend(self) -> str:
        """The name that torchrun knows it by."""
        return LOOPBACK

    def next_rendezvous(self) -> RendezvousInfo:
        """A new store, and the only place that there is.

        Raises:
            LaunchError: the port has been taken.
        """
        self._store = None  # its port may be the one that was named
        try:
            listening = listening_socket(self.master_addr, self.master_port)
        except OSError as error:
            raise LaunchError(
                f"the launcher cannot listen at {self.master_addr}:{self.master_port}: {error.strerror}.\n"
                "Leave --main_process_port out: a free port is then taken."
            ) from error
        port = listening.getsockname()[1]
        self._store = TCPStore(
            self.master_addr, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(self.master_addr, port))

    def shutdown(self) -> bool:
        """Leave the port; always done when this returns."""
        self._store = None
        return True


def register() -> None:
    """Let torchrun's engine, in this process, know the rendezvous."""
    rendezvous_handler_registry.register(LOOPBACK, OneMachineRendezvous)


def meet_machines(rendezvous: Rendezvous, machines: int) -> Any:
    """Wait until every machine of a static rendezvous is there, each under a number of its own; try one of c10d.

    Args:
        rendezvous: where they meet; of a static one, the option `rank` is this machine's number, `timeout` the limit in
            seconds. `read_timeout` is how many seconds one answer may take.
        machines: how many there must be; one meets nobody.

    Returns:
        A store; machine 0's listens on torchrun's own port, and is to be kept as long as the run lasts.

    Raises:
        LaunchError: a machine did not come in time, another has the same number, or counts other machines; or
            something else than a rendezvous listens there.
    """
    if machines > 1 and rendezvous.backend == "static":
        return _meet(rendezvous, machines)
    if machines > 1 and rendezvous.backend == "c10d":
        _try_store(rendezvous)
        _logger.info(_EXPOSED, rendezvous.endpoint)
    return None


def _meet(rendezvous: Rendezvous, machines: int) -> Any:
    rank, limit_s = int(rendezvous.options["rank"]), float(rendezvous.options.get("timeout", _LIMIT_S))
    host, port = host_of(rendezvous.endpoint), int(rendezvous.endpoint.rpartition(":")[2])
    deadline = time.monotonic() + limit_s
    hint = "" if rank else _hint(host)
    server = store = None

    def wait(what_is_missing: Callable[[], str]) -> None:
        log_at = time.monotonic() + _LOGS_AFTER_S
        while missing := what_is_missing():
            now = time.monotonic()
            if now > deadline:
                raise LaunchError(
                    f"{missing}, {limit_s:.0f} s after machine {rank} of {machines} came to {rendezvous.endpoint}. "
                    "Nothing was started here.\nStart the same command on every machine, each with its own "
                    f"--machine_rank; --rdzv_conf timeout=SECONDS waits longer.{hint}"
                )
            if now > log_at:
                _logger.info("machine %d of %d waits at %s: %s%s", rank, machines, rendezvous.endpoint, missing, hint)
                log_at = deadline  # once is enough
            time.sleep(_LOOK_S)

    try:
        limit = timedelta(seconds=limit_s)
        if rank == 0:
            server = _listen(host, port, limit)
        wait(lambda: _why_no_answer(host, port))
        _try_store(rendezvous)
        store = PrefixStore("zero_plugin/pre_rendezvous", TCPStore(host, port, None, False, limit, False))
        store.add("came", 1)
        _show(store, rank, machines, f"{socket.gethostname()} ({address_towards(host)}, process {os.getpid()})")
        wait(lambda: _who_is_missing(store, machines, "machine", "did not come"))
        store.set(f"here/{rank}", "")  # one that was killed meanwhile has left its number
        wait(lambda: _who_is_missing(store, machines, "here", "came, but does not answer any more"))
        if (outcome := _decide(store, _MET)) != _MET:
            raise LaunchError(outcome)
    except (DistError, RuntimeError, OSError) as error:  # RuntimeError: what answered is no store; OSError: the port
        raise LaunchError(
            f"machine {rank} could not meet the others at {rendezvous.endpoint}: {error}{hint}"
        ) from error
    except LaunchError as error:
        if store is not None:
            with suppress(DistError, RuntimeError):  # the store is gone with machine 0
                _leave(store, str(error), last=server is not None)
        raise
    return server or store


def _hint(host: str) -> str:
    """What may keep the other machines from reaching machine 0, which this is."""
    if not is_own_address(host):
        return f"\nThis is machine 0, but {host} is no address of it: is --machine_rank right?"
    address = own_address(host)
    if address in (None, host):
        return ""
    return f"\nMachine 0 listens at {address} alone: is that what {host} leads to on the other machines?"


def _listen(host: str, port: int, limit: timedelta) -> Any:
    """Machine 0's store, on the network that leads to `host`; on all of them where only the other machines know it.

    torchrun's static rendezvous, later in this process, finds it by its port. For all networks torch would wait without
    a word for an answer of `host`, which may be another machine's.
    """
    address = own_address(host)
    if address is None:
        return TCPStore(OWN_ADDRESS, port, None, True, limit, False, multi_tenant=True)
    file = listening_socket(address, port).detach()
    return TCPStore(address, port, None, True, limit, False, multi_tenant=True, master_listen_fd=file)


def _try_store(rendezvous: Rendezvous) -> None:
    """Ask what listens where the machines meet whether it is a rendezvous; return if it is, or if nothing listens yet.

    torch itself would wait for the answer without end.

    Raises:
        LaunchError: something else listens there.
    """
    host, port = host_of(rendezvous.endpoint), rendezvous.endpoint.rpartition(":")[2]
    if not port.isdigit() or _why_no_answer(host, int(port)):
        return
    limit_s = float(rendezvous.options.get("read_timeout", _ANSWERS_WITHIN_S))
    refused: list[RuntimeError] = []

    def ask() -> None:
        try:
            TCPStore(host, int(port), None, False, timedelta(seconds=limit_s), False)
        except RuntimeError as error:
            refused.append(error)

    if not run_in_threads(limit_s, ask) or refused:
        why = str(refused[0]) if refused else f"no answer within {limit_s:.0f} s"
        raise LaunchError(
            f"what listens at {rendezvous.endpoint} is no rendezvous of torchrun's ({why}).\n"
            "Give all machines another port (--main_process_port, --rdzv_endpoint)."
        )


def _why_no_answer(host: str, port: int) -> str:
    """Why machine 0 cannot be reached; "" if it answers."""
    error = try_to_connect(host, port, _CONNECT_S)
    return f"machine 0 does not answer ({error.strerror or error})" if error is not None else ""


def _show(store: Any, rank: int, machines: int, me: str) -> None:
    """Leave this machine's number for the others to see.

    Raises:
        LaunchError: another machine has the same number, or counts other machines.
    """
    counted = store.compare_set("machines", "", f"{machines} on machine {rank}").decode()
    if int(counted.partition(" ")[0]) != machines:
        raise LaunchError(
            f"the machines count differently: {counted}, {machines} on machine {rank}.\n"
            "Give all of them the same --num_machines."
        )
    mine = f"{me}\n{uuid.uuid4().hex}"  # containers may share a name and the numbers of their processes
    first = store.compare_set(f"machine/{rank}", "", mine).decode()
    if first != mine:
        raise LaunchError(
            f"two machines have the number {rank}: {first.splitlines()[0]} and {me}.\n"
            f"Give each its own --machine_rank, 0 to {machines - 1}. (One that was started anew is taken back only by "
            "--rdzv_backend c10d.)"
        )


def _who_is_missing(store: Any, machines: int, what: str, how: str) -> str:
    """Which machines have not left `what`, and `how` to call that; "" if all have.

    Raises:
        LaunchError: what another machine found wrong.
    """
    if store.check(["outcome"]) and (outcome := store.get("outcome").decode()) != _MET:
        raise LaunchError(outcome)
    missing = [str(number) for number in range(machines) if not store.check([f"{what}/{number}"])]
    return f"machine{'s' if len(missing) > 1 else ''} {', '.join(missing)} {how}" if missing else ""


def _decide(store: Any, outcome: str) -> str:
    """End the pre-rendezvous so, unless another machine has ended it; how it has ended, for all.

    A machine that continued while another does not would wait for it silently, in torch.
    """
    return str(store.compare_set("outcome", "", outcome).decode())


def _leave(store: Any, why: str, *, last: bool) -> None:
    """Tell the others why this machine does not stay; the `last`, which has the store, waits until they have heard."""
    _decide(store, why)
    store.add("left", 1)
    deadline = time.monotonic() + _FAREWELL_S
    while last and store.add("left", 0) < store.add("came", 0) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)


def store_command(port: str) -> str:
    """A shell's command that keeps, at `port` of the host where it is typed, what the machines of a run agree on."""
    store = f"TCPStore('0.0.0.0', {port}, is_master=True, wait_for_workers=False)"
    return f'python -c "import signal; from torch.distributed import TCPStore; store = {store}; signal.pause()"'


class Contact:
    """While it is entered, the connection to where the machines meet is tried; when it is lost, the workers end.

    Attributes:
        lost: what happened, "" as long as nothing did.

    Args:
        rendezvous: where they meet; its option `read_timeout` is how long machine 0 may be silent, in seconds.
        machines: with one there is nothing to watch, nor on machine 0.
        least: with how many of them the run continues; None for all.
    """

    def __init__(self, rendezvous: Rendezvous, machines: int, least: int | None = None) -> None:
        self.lost = ""
        self._host, self._port = host_of(rendezvous.endpoint), rendezvous.endpoint.rpartition(":")[2]
        self._limit_s = float(rendezvous.options.get("read_timeout", _ANSWERS_WITHIN_S))
        self._watched = machines > 1 and self._port.isdigit() and not is_own_address(self._host)
        self._ended = threading.Event()
        self._fix = ""
        if least is not None and least < machines:
            self._fix = (
                f"\nThe run can lose any machine but the one that --rdzv_endpoint names ({self._host}), whose launcher "
                "keeps what they agree on.\nTo outlive that one too, start a process that keeps it, before the "
                f"launchers, on a host that stays, and name that:\n    {store_command(self._port)}"
            )

    def __enter__(self) -> Contact:
        if self._watched:
            threading.Thread(target=self._watch, name="zero_plugin contact", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def leave(self) -> None:
        """Say what happened and end this process: threads of torch's that wait for machine 0 would keep it for ever."""
        end_process(f"{self.lost}{self._fix}")

    def _watch(self) -> None:
        heard = time.monotonic()
        met = False
        while not self._ended.wait(_CONTACT_LOOK_S):
            error = try_to_connect(self._host, int(self._port), _CONTACT_LOOK_S)
            why = str(error.strerror or error) if error is not None else ""
            if error is None or error.errno in _THERE:
                heard, met = time.monotonic(), True
            elif met and time.monotonic() - heard > self._limit_s:
                break
        if self._ended.is_set():
            return
        self.lost = (
            f"the connection to {self._host}, where the machines have met, is lost for {self._limit_s:.0f} s ({why}); "
            "all workers here are stopped"
        )
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self.leave()  # there are no workers yet, and the signal would end this process silently
        os.kill(os.getpid(), signal.SIGTERM)  # torchrun stops the workers
        if not self._ended.wait(_STOPS_WITHIN_S):
            self.leave()  # the workers end with this process


def main() -> None:
    """Run torchrun."""
    from torch.distributed.run import main as torchrun

    register()
    torchrun()


if __name__ == "__main__":
    main()
