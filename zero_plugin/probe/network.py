"""By which of its addresses and interfaces this machine reaches another one."""

from __future__ import annotations

import ipaddress
import socket
import struct
from pathlib import Path
from typing import Final

__all__ = ["address_towards", "host_of", "interface_towards", "is_loopback", "is_own_address"]

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
