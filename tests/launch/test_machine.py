"""The launcher's view of the machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from zero_plugin.machine import hardware as machine
from zero_plugin.machine.hardware import count_cores, count_gpus, port_is_free


def test_cores_are_those_this_process_may_use() -> None:
    """A process bound to one core counts one."""
    assert 1 <= count_cores() <= (os.cpu_count() or 1)
    if hasattr(os, "sched_setaffinity"):
        code = (
            "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]);"
            "from zero_plugin.machine.hardware import count_cores; print(count_cores())"
        )
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "1"


def test_gpus_are_counted_by_torch_only_where_a_driver_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a driver's device file the answer is 0; with one, torch's own count."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(machine, "_GPU_DRIVERS", ("/no/such/device",))
    assert count_gpus() == 0
    monkeypatch.setattr(machine, "_GPU_DRIVERS", ("/dev/null",))
    assert count_gpus() == torch.cuda.device_count()


def test_ports() -> None:
    """A port with a server is taken, and free again when the server is gone."""
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        assert not port_is_free(port)
    assert port_is_free(port)
