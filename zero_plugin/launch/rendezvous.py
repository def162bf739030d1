"""The rendezvous of a launch on one machine: its store listens on loopback alone, and nothing in it is a pickle.

torch's own would let others in: the store of `c10d` listens on every interface, and whoever writes a pickle into it has
the launcher run code; that of `static` listens on every interface too, and is not renewed for a restart.

`python -m zero_plugin.launch.rendezvous ARGUMENT…` is torchrun with this rendezvous beside its own.
"""

from __future__ import annotations

from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from zero_plugin.errors import LaunchError
from zero_plugin.launch.spec import LOOPBACK
from zero_plugin.machine.network import host_of, listening_socket


class OneMachineRendezvous(RendezvousHandler):
    """A rendezvous of one launcher, with itself.

    What torchrun's agent writes for other agents stays in the memory of this process. Its workers get a TCP store,
    which is another one with each start of them: in one store for all, those of a restart would read the addresses of
    processes that are gone.

    Args:
        parameters: torchrun's, of which `endpoint` says where the store listens; port 0 takes a free one.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._host, self._port = host_of(parameters.endpoint), int(parameters.endpoint.rpartition(":")[2])
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        """The name that torchrun knows it by."""
        return LOOPBACK

    @property
    def use_agent_store(self) -> bool:
        """The workers are clients of this process's store, rank 0 too."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """A new store, and the only place that there is.

        Raises:
            LaunchError: the port has been taken.
        """
        self._store = None  # its port may be the one that was named
        try:
            listening = listening_socket(self._host, self._port)
        except OSError as error:
            raise LaunchError(
                f"the launcher cannot listen at {self._host}:{self._port}: {error.strerror}.\n"
                "Leave --main_process_port out: a free port is then taken."
            ) from error
        port = listening.getsockname()[1]
        self._store = TCPStore(
            self._host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(self._host, port))

    def is_closed(self) -> bool:
        """Nobody else could close it."""
        return False

    def set_closed(self) -> None:
        """There is nobody who would have to know."""

    def num_nodes_waiting(self) -> int:
        """No other machine joins."""
        return 0

    def get_run_id(self) -> str:
        """The run's."""
        return self._run_id

    def shutdown(self) -> bool:
        """Leave the port; always done when this returns."""
        self._store = None
        return True


def register() -> None:
    """Let torchrun's engine, in this process, know the rendezvous."""
    rendezvous_handler_registry.register(LOOPBACK, OneMachineRendezvous)


def main() -> None:
    """Run torchrun."""
    from torch.distributed.run import main as torchrun

    register()
    torchrun()


if __name__ == "__main__":
    main()
