"""The rendezvous of a run's launchers: one for a single machine, and checks before torchrun's for several machines.

torch's own rendezvous would let others in. The `c10d` store listens on every interface, and a pickle written into the
store makes the launcher run code. The `static` store listens on every interface too, and a restart does not renew it.
For a launch on one machine, this module's store listens on loopback only and contains no pickle.

On several machines the launchers first meet in a pre-rendezvous, which names missing machines, duplicate ranks and
foreign services. Later the launchers watch whether machine 0 can be reached.

`python -m zero_plugin.launch.rendezvous ARGUMENT…` is torchrun with the rendezvous of one machine added.
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

_LIMIT_S: Final = 600.0  # torch's default for a static rendezvous
_ANSWERS_WITHIN_S: Final = 60.0  # torch's default for one answer of the store
_LOGS_AFTER_S: Final = 10.0
_LOOK_S: Final = 0.1
_CONNECT_S: Final = 3.0
_FAREWELL_S: Final = 5.0  # the store ends with machine 0: time for the others to read the reason from the store
_MET: Final = "met"
_EXPOSED: Final = (
    "rdzv_backend: c10d: the rendezvous at %s listens on every network of its machine. Any program that can reach it "
    "can make the launchers run code. Allow access only from the machines of the run."
)
_CONTACT_LOOK_S: Final = 2.0
_STOPS_WITHIN_S: Final = 10.0
# A machine that refuses a connection can be reached. Its launcher has ended, which is torchrun's to notice.
_THERE: Final = (errno.ECONNREFUSED, errno.ECONNRESET)


class OneMachineRendezvous(StaticTCPRendezvous):
    """The rendezvous of a single launcher: torch's static rendezvous with other stores.

    The data that torchrun's agent writes for other agents stays in this process's memory. The workers get a TCP store,
    a new one for each start. In one store for all starts, restarted workers would read addresses of ended processes.

    Args:
        parameters: torchrun's. The store listens at their `endpoint`; port 0 takes a free port.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        host, port = host_of(parameters.endpoint), int(parameters.endpoint.rpartition(":")[2])
        super().__init__(host, port, rank=0, world_size=1, run_id=parameters.run_id, timeout=int(_LIMIT_S))

    def get_backend(self) -> str:
        """Return torchrun's name for this rendezvous."""
        return LOOPBACK

    def next_rendezvous(self) -> RendezvousInfo:
        """Create a new store, and take the only place in the rendezvous.

        Raises:
            LaunchError: another process has taken the port.
        """
        self._store = None  # first: the old store may hold the configured port
        try:
            listening = listening_socket(self.master_addr, self.master_port)
        except OSError as error:
            raise LaunchError(
                f"the launcher cannot listen at {self.master_addr}:{self.master_port}: {error.strerror}.\n"
                "Leave --main_process_port out: the launcher then takes a free port."
            ) from error
        port = listening.getsockname()[1]
        self._store = TCPStore(
            self.master_addr, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(self.master_addr, port))

    def shutdown(self) -> bool:
        """Free the port. Always succeeds."""
        self._store = None
        return True


def register() -> None:
    """Register the rendezvous with torchrun's engine in this process."""
    rendezvous_handler_registry.register(LOOPBACK, OneMachineRendezvous)


def meet_machines(rendezvous: Rendezvous, machines: int) -> Any:
    """Wait for all machines of a static rendezvous, each with its own number. For c10d, only check the endpoint.

    Args:
        rendezvous: the rendezvous. If static, the option `rank` is this machine's number, and `timeout` the limit in
            seconds. `read_timeout` is the limit for one answer, in seconds.
        machines: the required number of machines. With one, there is nothing to wait for.

    Returns:
        A store, or None. Machine 0's store listens on torchrun's own port. Keep the store as long as the run lasts.

    Raises:
        LaunchError: a machine did not come in time, two machines have the same number or a different `num_machines`,
            or another service listens at the endpoint.
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
                log_at = deadline  # log only once
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
        store.set(f"here/{rank}", "")  # a second round, because the number of a killed machine stays in the store
        wait(lambda: _who_is_missing(store, machines, "here", "came, but does not answer any more"))
        if (outcome := _decide(store, _MET)) != _MET:
            raise LaunchError(outcome)
    except (DistError, RuntimeError, OSError) as error:  # RuntimeError: not a store answered; OSError: the port
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
    """Describe what may keep other machines from reaching this machine, which is machine 0; "" if nothing is known."""
    if not is_own_address(host):
        return f"\nThis is machine 0, but {host} is no address of it: is --machine_rank right?"
    address = own_address(host)
    if address in (None, host):
        return ""
    return f"\nMachine 0 listens at {address} only: does {host} lead to that address on the other machines?"


def _listen(host: str, port: int, limit: timedelta) -> Any:
    """Create machine 0's store on the network that leads to `host`, or on all networks if that address is uncertain.

    torchrun's static rendezvous, later in this process, finds the store by its port. On all networks the store gets
    the loopback address: with `host`, torch would wait silently for an answer from what may be another machine.
    """
    address = own_address(host)
    if address is None:
        return TCPStore(OWN_ADDRESS, port, None, True, limit, False, multi_tenant=True)
    file = listening_socket(address, port).detach()
    return TCPStore(address, port, None, True, limit, False, multi_tenant=True, master_listen_fd=file)


def _try_store(rendezvous: Rendezvous) -> None:
    """Check that the endpoint is a rendezvous, or that nothing listens there yet.

    torch itself would wait for the answer without a time limit.

    Raises:
        LaunchError: another service listens there.
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
            f"the service at {rendezvous.endpoint} is not torchrun's rendezvous ({why}).\n"
            "Give all machines another port (--main_process_port, --rdzv_endpoint)."
        )


def _why_no_answer(host: str, port: int) -> str:
    """Return why machine 0 cannot be reached, "" if machine 0 answers."""
    error = try_to_connect(host, port, _CONNECT_S)
    return f"machine 0 does not answer ({error.strerror or error})" if error is not None else ""


def _show(store: Any, rank: int, machines: int, me: str) -> None:
    """Publish this machine's number for the others.

    Raises:
        LaunchError: another machine has the same number, or another `num_machines`.
    """
    counted = store.compare_set("machines", "", f"{machines} on machine {rank}").decode()
    if int(counted.partition(" ")[0]) != machines:
        raise LaunchError(
            f"the machines count differently: {counted}, {machines} on machine {rank}.\n"
            "Give all of them the same --num_machines."
        )
    mine = f"{me}\n{uuid.uuid4().hex}"  # containers may share host names and process ids
    first = store.compare_set(f"machine/{rank}", "", mine).decode()
    if first != mine:
        raise LaunchError(
            f"two machines have the number {rank}: {first.splitlines()[0]} and {me}.\n"
            f"Give each its own --machine_rank, 0 to {machines - 1}. (A restarted machine can join again only with "
            "--rdzv_backend c10d.)"
        )


def _who_is_missing(store: Any, machines: int, what: str, how: str) -> str:
    """Name the machines without the key `what` in the store, followed by `how`; "" if all machines have the key.

    Raises:
        LaunchError: another machine reported a problem.
    """
    if store.check(["outcome"]) and (outcome := store.get("outcome").decode()) != _MET:
        raise LaunchError(outcome)
    missing = [str(number) for number in range(machines) if not store.check([f"{what}/{number}"])]
    return f"machine{'s' if len(missing) > 1 else ''} {', '.join(missing)} {how}" if missing else ""


def _decide(store: Any, outcome: str) -> str:
    """End the pre-rendezvous with an outcome, unless another machine has done so. Return the outcome for all machines.

    A single outcome is needed: a machine that continues would wait silently, in torch, for a machine that gave up.
    """
    return str(store.compare_set("outcome", "", outcome).decode())


def _leave(store: Any, why: str, *, last: bool) -> None:
    """Publish why this machine leaves. The `last` machine, which holds the store, waits until the others have left."""
    _decide(store, why)
    store.add("left", 1)
    deadline = time.monotonic() + _FAREWELL_S
    while last and store.add("left", 0) < store.add("came", 0) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)


def store_command(port: str) -> str:
    """Return a shell command that hosts a store for the machines of a run, at `port` of the host that runs it."""
    store = f"TCPStore('0.0.0.0', {port}, is_master=True, wait_for_workers=False)"
    return f'python -c "import signal; from torch.distributed import TCPStore; store = {store}; signal.pause()"'


class Contact:
    """A watch over the connection to the rendezvous, while the context is entered. A lost connection ends the workers.

    Attributes:
        lost: description of the loss, "" without one.

    Args:
        rendezvous: the rendezvous. Its option `read_timeout` is how long machine 0 may be silent, in seconds.
        machines: number of machines. With one, or on machine 0, there is nothing to watch.
        least: the smallest number of machines that the run continues with; None for all.
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
                f"\nThe run can lose any machine except the one in --rdzv_endpoint ({self._host}), whose launcher "
                "hosts the rendezvous store.\nTo survive that loss too, start a store before the launchers, on a host "
                f"that stays, and name that host in --rdzv_endpoint:\n    {store_command(self._port)}"
            )

    def __enter__(self) -> Contact:
        if self._watched:
            threading.Thread(target=self._watch, name="zero_plugin contact", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def leave(self) -> None:
        """Print the loss and end this process. torch's threads that wait for machine 0 would keep it alive forever."""
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
            f"the connection to {self._host}, where the machines met, has been lost for {self._limit_s:.0f} s ({why}); "
            "all workers here are stopped"
        )
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self.leave()  # no worker exists yet, and the signal would end this process silently
        os.kill(os.getpid(), signal.SIGTERM)  # torchrun stops the workers
        if not self._ended.wait(_STOPS_WITHIN_S):
            self.leave()  # torchrun did not stop: the workers end with this process


def main() -> None:
    """Run torchrun with the rendezvous of one machine registered."""
    from torch.distributed.run import main as torchrun

    register()
    torchrun()


if __name__ == "__main__":
    main()
