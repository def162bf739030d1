"""By which of its addresses and interfaces this machine reaches another one."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
from pathlib import Path
from typing import Final

OWN_ADDRESS: Final = "127.0.0.1"  # by which processes of one machine find each other, and nobody else finds them
_ANY_PORT: Final = 9  # nothing is sent: connecting a datagram socket only asks for the route
_SIOCGIFADDR: Final = 0x8915
_IPV6_ADDRESSES: Final = Path("/proc/net/if_inet6")


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
    """The network interface by which `host` is reached, e.g. `eth0`; None where it cannot be told.

    For `host` itself that is the interface that carries the address, not the loopback that the route would name.
    """
    address = address_towards(host)
    return None if address is None else _interface_of(address)


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


def is_loopback(host: str) -> bool:
    """Whether `host` means, on every machine, that machine itself."""
    found = _resolve(host)
    return found is not None and ipaddress.ip_address(found[1].partition("%")[0]).is_loopback


def _resolve(host: str) -> tuple[socket.AddressFamily, str] | None:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        return None
    return family, str(address[0])


def _interface_of(address: str) -> str | None:
    if ":" in address:
        return _interface_of_ipv6(address)
    try:
        import fcntl
    except ImportError:  # not a Unix
        return None
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            try:
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no IPv4 address
                continue
        if socket.inet_ntoa(answer[20:24]) == address:
            return name
    return None


def _interface_of_ipv6(address: str) -> str | None:
    wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
    try:
        lines = _IPV6_ADDRESSES.read_text().splitlines()
    except OSError:
        return None
    return next((line.split()[-1] for line in lines if line.startswith(wanted)), None)
