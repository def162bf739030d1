"""By which of its addresses and interfaces this machine reaches another one."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from typing import Final

import psutil

OWN_ADDRESS: Final = "127.0.0.1"  # by which processes of one machine find each other, and nobody else finds them
_ANY_PORT: Final = 9  # nothing is sent: connecting a datagram socket only asks for the route


def address_towards(host: str) -> str | None:
    """The address of this machine that `host` sees; None where that is not known.

    Many systems give their own name the loopback's address, which says nothing of the network: not known either.
    """
    found = _resolve(host)
    if found is None or (is_loopback(host) and found[1] != host and host != "localhost"):
        return None
    family, address = found
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((address, _ANY_PORT))
        except OSError:
            return None
        return str(asking.getsockname()[0])


def interface_towards(host: str) -> str | None:
    """The network interface by which `host` is reached, e.g. `eth0`; None where it is not known.

    For `host` itself that is the interface that carries the address, not the loopback that the route would name.
    """
    address = address_towards(host)
    return None if address is None else _interface_of(address)


def network_variables(host: str, *, nccl: bool) -> dict[str, str]:
    """The variables that make gloo, and NCCL too, use the network interface by which `host` is reached, if it is known.

    By default gloo uses the interface of this machine's host name, which on many systems other machines cannot reach.
    """
    interface = interface_towards(host)
    if interface is None:
        return {}
    # without the "=", NCCL would take the name as a prefix
    return {"GLOO_SOCKET_IFNAME": interface, **({"NCCL_SOCKET_IFNAME": f"={interface}"} if nccl else {})}


def host_of(endpoint: str) -> str:
    """The host of `host:port`, `[address]:port` or `host`."""
    host, colon, port = endpoint.rpartition(":")
    return (host if colon and port.isdigit() else endpoint).strip("[]")


def own_address(host: str) -> str | None:
    """The address by which all who know this machine as `host` reach it; None where that is not sure.

    Not sure are a name with several addresses, which others may try in another order, and one that leads to loopback
    here and elsewhere to the network.
    """
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return None
    if host == "localhost":
        return OWN_ADDRESS
    return address_towards(host) if len(found) == 1 and is_own_address(host) else None


def is_own_address(host: str) -> bool:
    """Whether `host` names an address of this machine."""
    found = _resolve(host)
    if found is None:
        return False
    family, address = found
    with socket.socket(family, socket.SOCK_STREAM) as server:
        try:
            server.bind((address, 0))
        except OSError:
            return False
    return True


def own_name_resolves() -> bool:
    """Whether this machine's own name leads to an address, as seen from this machine."""
    return _resolve(socket.gethostname()) is not None


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens at `port` of the one address of this machine that `host` names; 0 takes a free port.

    Raises:
        OSError: it is no address of this machine, or the port is taken.
    """
    found = _resolve(host)
    if found is None:
        raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    family, address = found
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free for a server
        listening.bind((address, port))
        listening.listen(socket.SOMAXCONN)
    except OSError:
        listening.close()
        raise
    return listening


def try_to_connect(host: str, port: int, seconds: float) -> OSError | None:
    """Why nothing that listens there can be reached, None if it can."""
    try:
        socket.create_connection((host, port), timeout=seconds).close()
    except OSError as error:
        return error
    return None


def is_loopback(host: str) -> bool:
    """Whether `host` means, on every machine, that machine itself."""
    found = _resolve(host)
    return found is not None and ipaddress.ip_address(_without_scope(found[1])).is_loopback


def _resolve(host: str) -> tuple[socket.AddressFamily, str] | None:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        return None
    return family, str(address[0])


def _interface_of(address: str) -> str | None:
    wanted = ipaddress.ip_address(_without_scope(address))
    for name, entries in psutil.net_if_addrs().items():
        texts = [entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
        if any(ipaddress.ip_address(_without_scope(text)) == wanted for text in texts):
            return str(name)
    return None


def _without_scope(address: str) -> str:
    return address.partition("%")[0]
