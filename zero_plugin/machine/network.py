"""Finds the addresses and interfaces with which this machine reaches another one."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from typing import Final

import psutil

OWN_ADDRESS: Final = "127.0.0.1"  # connects the processes of one machine, and is unreachable from others
_ANY_PORT: Final = 9  # any number works, because nothing is sent: connecting a datagram socket only finds the route


def address_towards(host: str) -> str | None:
    """Return the address of this machine that `host` sees; None if unknown.

    It is also unknown if a name resolves to loopback, as many systems' own name does: this says nothing about the
    network.
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
    """Return the network interface that leads to `host`, e.g. `eth0`; None if unknown.

    If `host` is this machine, the interface is the one with the address, not the loopback interface of the route.
    """
    address = address_towards(host)
    return None if address is None else _interface_of(address)


def network_variables(host: str, *, nccl: bool) -> dict[str, str]:
    """Return the variables that make gloo, and NCCL on request, use the interface that leads to `host`, if known.

    By default, gloo uses the interface of this machine's host name. On many systems, other machines cannot reach it.
    """
    interface = interface_towards(host)
    if interface is None:
        return {}
    # Without the "=", NCCL would take the name as a prefix.
    return {"GLOO_SOCKET_IFNAME": interface, **({"NCCL_SOCKET_IFNAME": f"={interface}"} if nccl else {})}


def host_of(endpoint: str) -> str:
    """Return the host of `host:port`, `[address]:port` or `host`."""
    host, colon, port = endpoint.rpartition(":")
    return (host if colon and port.isdigit() else endpoint).strip("[]")


def own_address(host: str) -> str | None:
    """Return the address that every machine uses for `host`, if this machine is `host`; None if this is not certain.

    It is not certain for a name with several addresses, which others may try in another order. It is not certain either
    for a name that means loopback here, but may mean a network address elsewhere.
    """
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return None
    if host == "localhost":
        return OWN_ADDRESS
    return address_towards(host) if len(found) == 1 and is_own_address(host) else None


def is_own_address(host: str) -> bool:
    """Return whether `host` names an address of this machine."""
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
    """Return whether this machine can resolve its own name."""
    return _resolve(socket.gethostname()) is not None


def listening_socket(host: str, port: int) -> socket.socket:
    """Open a socket that listens at `port` of this machine's address `host` only; port 0 takes a free port.

    Raises:
        OSError: `host` is not an address of this machine, or the port is taken.
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
    """Try to connect to a listener. Return the error, or None on success."""
    try:
        socket.create_connection((host, port), timeout=seconds).close()
    except OSError as error:
        return error
    return None


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address, with which every machine means itself."""
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
