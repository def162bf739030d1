"""Watch, from the other machines, that machine 0 can be reached: what waits for its answer in C++ cannot be woken."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import threading
import time
from types import TracebackType
from typing import Final

from zero_plugin.launch.spec import Rendezvous
from zero_plugin.probe.network import host_of, is_own_address

__all__ = ["Contact", "store_command"]

_LIMIT_S: Final = 60.0  # torch's own for one answer of the store
_LOOK_S: Final = 2.0
_STOPS_WITHIN_S: Final = 10.0
# A machine that refuses is there: its launcher has ended, which torchrun notices, or need not.
_THERE: Final = (errno.ECONNREFUSED, errno.ECONNRESET)


def store_command(port: str) -> str:
    """A shell's command that keeps, at `port` of the host where it is typed, what the machines of a run agree on."""
    store = f"TCPStore('0.0.0.0', {port}, is_master=True, wait_for_workers=False)"
    return f'python -c "import signal; from torch.distributed import TCPStore; store = {store}; signal.pause()"'


class Contact:
    """While it is entered, the connection to where the machines meet is tried; when it is lost, the workers end.

    Attributes:
        lost: what happened, "" as long as nothing did.

    Args:
        meeting: the rendezvous; its option `read_timeout` is how long machine 0 may be silent, in seconds.
        machines: with one there is nothing to watch, nor on machine 0.
        least: with how many of them the run goes on; None for all.
    """

    def __init__(self, meeting: Rendezvous, machines: int, least: int | None = None) -> None:
        self.lost = ""
        self._host, self._port = host_of(meeting.endpoint), meeting.endpoint.rpartition(":")[2]
        self._limit_s = float(meeting.options.get("read_timeout", _LIMIT_S))
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()

    def leave(self) -> None:
        """Say what happened and end this process: threads of torch's that wait for machine 0 would keep it for ever."""
        print(f"error: {self.lost}{self._fix}", file=sys.stderr, flush=True)  # noqa: T201 - the last words of this launcher
        sys.stdout.flush()
        os._exit(1)

    def _watch(self) -> None:
        heard = time.monotonic()
        met = False
        while not self._ended.wait(_LOOK_S):
            why = self._try()
            if not why:
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
            self.leave()  # there are no workers yet, and the signal would end this process without a word
        os.kill(os.getpid(), signal.SIGTERM)  # torchrun stops the workers
        if not self._ended.wait(_STOPS_WITHIN_S):
            self.leave()  # the workers end with this process

    def _try(self) -> str:
        try:
            socket.create_connection((self._host, int(self._port)), timeout=_LOOK_S).close()
        except OSError as error:
            return "" if error.errno in _THERE else str(error.strerror or error)
        return ""
