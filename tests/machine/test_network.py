"""The address and interface that lead to another machine."""

from __future__ import annotations

import socket

import pytest

from zero_plugin.machine.network import (
    address_towards,
    host_of,
    interface_towards,
    is_loopback,
    is_own_address,
    listening_socket,
    own_address,
)


def test_this_machine_reaches_itself_by_its_loopback() -> None:
    """The loopback has an address and an interface, and belongs to this machine."""
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_towards("localhost") in ("lo", "lo0")
    assert is_own_address("127.0.0.1")
    assert is_loopback("localhost")
    assert own_address("127.0.0.1") == own_address("localhost") == "127.0.0.1"


def test_a_name_that_nobody_has() -> None:
    """An unknown name gives no address, no interface, and no exception."""
    assert address_towards("no-such-host.invalid") is None
    assert interface_towards("no-such-host.invalid") is None
    assert not is_own_address("no-such-host.invalid")
    assert not is_loopback("no-such-host.invalid")
    assert not is_own_address("192.0.2.1")  # reserved for documentation
    assert own_address("no-such-host.invalid") is own_address("192.0.2.1") is None
    with pytest.raises(OSError, match="Cannot assign requested address"):
        listening_socket("no-such-host.invalid", 0)


def test_a_name_of_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host's own name on a loopback address, such as 127.0.1.1, is no network that others can reach."""
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **more: real("127.0.0.1", *rest, **more))
    assert address_towards("my-name") is None
    assert interface_towards("my-name") is None
    assert is_own_address("my-name")
    assert own_address("my-name") is None


def test_a_name_with_several_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with several addresses gets no listener on one of them, since others may try another one first."""
    both = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0)) for address in ("127.0.0.1", "127.0.0.2")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    assert own_address("my-name") is None


def test_a_socket_listens_at_one_address() -> None:
    """A socket takes its port at one address. The port stays free at the machine's other addresses."""
    with listening_socket("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        listening_socket("127.0.0.2", port).close()
        with pytest.raises(OSError, match="Address already in use"):
            listening_socket("localhost", port)


@pytest.mark.parametrize(
    ("endpoint", "host"),
    [("node:29500", "node"), ("node", "node"), ("10.0.0.1:0", "10.0.0.1"), ("[fe80::1]:29500", "fe80::1")],
)
def test_host_of_an_endpoint(endpoint: str, host: str) -> None:
    """The host is parsed with and without a port."""
    assert host_of(endpoint) == host
