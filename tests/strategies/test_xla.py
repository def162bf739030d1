"""What replicas do around the XLA runtime, which these tests stand in for."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from zero_plugin.strategies.replica import Replica

_AGENT = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"}


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """One device of a TPU, on which torch_xla itself may be missing."""
    found = SimpleNamespace(get_master_ip=lambda: "10.0.0.1", device_type=lambda: "TPU", world_size=lambda: 1)
    monkeypatch.setitem(sys.modules, "torch_xla.runtime", found)


@pytest.mark.parametrize(("world_size", "address", "port"), [(4, "localhost", "29500"), (8, "10.0.0.1", "12355")])
def test_where_replicas_meet(monkeypatch: pytest.MonkeyPatch, world_size: int, address: str, port: str) -> None:
    """In the launcher's store on one machine; of several each launcher has its own, though nobody said how many."""
    for name, value in _AGENT.items():
        monkeypatch.setenv(name, value)
    group = Replica(0, 0, world_size, 4, torch.device("cpu")).describe_group()
    assert (group["MASTER_ADDR"], group["MASTER_PORT"]) == (address, port)
    assert ("TORCHELASTIC_USE_AGENT_STORE" in os.environ) == (world_size == 4)
