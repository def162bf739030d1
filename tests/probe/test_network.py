"""Which address and interface lead to another machine."""

from __future__ import annotations

import socket

import pytest

from zero_plugin.probe.network import address_towards, host_of, interface_towards, is_loopback, is_own_address


def test_this_machine_reaches_itself_by_its_loopback() -> None:
    """The loopback has an address, an interface, and is this machine's own."""
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_towards("localhost") in ("lo", "lo0")
    assert is_own_address("127.0.0.1")
    assert is_loopback("localhost")


def test_a_name_that_nobody_has() -> None:
    """No address, no interface, no exception."""
    assert address_towards("no-such-host.invalid") is None
    assert interface_towards("no-such-host.invalid") is None
    assert not is_own_address("no-such-host.invalid")
    assert not is_loopback("no-such-host.invalid")
    assert not is_own_address("192.0.2.1")  # reserved for documentation


def test_a_name_of_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a system's own name leads to, as 127.0.1.1 in its list of hosts, is no network that others reach it by."""
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **more: real("127.0.0.1", *rest, **more))
    assert address_towards("my-name") is None
    assert interface_towards("my-name") is None
    assert is_own_address("my-name")


@pytest.mark.parametrize(
    ("endpoint", "host"),
    [("node:29500", "node"), ("node", "node"), ("10.0.0.1:0", "10.0.0.1"), ("[fe80::1]:29500", "fe80::1")],
)
def test_host_of_an_endpoint(endpoint: str, host: str) -> None:
    """With and without a port."""
    assert host_of(endpoint) == host
