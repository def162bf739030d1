"""The replicas' work around the XLA runtime, which these tests replace."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zero_plugin.distributed.processes import Processes, describe_group, find_replica
from zero_plugin.errors import LaunchError, LoopError
from zero_plugin.strategies.xla import XlaStrategy

_AGENT = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"}


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate one device of a TPU. torch_xla itself may be missing."""
    package = SimpleNamespace(
        runtime=SimpleNamespace(get_master_ip=lambda: "10.0.0.1", device_type=lambda: "TPU", world_size=lambda: 1),
        core=SimpleNamespace(xla_model=None),
        sync=None,
        manual_seed=lambda seed: None,
        device=lambda: torch.device("cpu"),
    )
    monkeypatch.setitem(sys.modules, "torch_xla", package)
    monkeypatch.setattr("zero_plugin.machine.xla_runtime.find_version_problem", lambda: "")


@pytest.mark.parametrize(("world_size", "address", "port"), [(4, "localhost", "29500"), (8, "10.0.0.1", "12355")])
def test_where_replicas_meet(monkeypatch: pytest.MonkeyPatch, world_size: int, address: str, port: str) -> None:
    """Replicas on one machine meet in the launcher's store. With several machines each launcher has its own store."""
    for name, value in _AGENT.items():
        monkeypatch.setenv(name, value)
    group = describe_group(Processes(0, 0, world_size, torch.device("cpu")), 4)
    assert (group["MASTER_ADDR"], group["MASTER_PORT"]) == (address, port)
    assert ("TORCHELASTIC_USE_AGENT_STORE" in os.environ) == (world_size == 4)


@pytest.mark.parametrize("hold", [weakref.ref, lambda weight: weight.view(-1)], ids=["weak reference", "view"])
def test_a_parameter_that_is_held_elsewhere(monkeypatch: pytest.MonkeyPatch, hold: Callable[..., Any]) -> None:
    """Its device cannot change while an optimizer knows the object. The error gives the fix, unlike torch's."""
    monkeypatch.setattr("zero_plugin.strategies.xla.convert_weights_to_fp32", lambda request: None)
    model, processes = nn.Linear(2, 2), Processes(0, 0, 1, torch.device("meta"))
    held = hold(model.weight)
    request: Any = SimpleNamespace(model=model, is_placed=True)
    with pytest.raises(LoopError, match=r"cannot move the Linear to meta: .*\n.*\.to\(accelerator\.device\)"):
        XlaStrategy(processes).build_session(request, processes)
    assert held is not None


def test_a_refused_optimizer_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that catches the error and continues has none of our hooks on its model."""

    def refuse(_: Any) -> None:
        raise LoopError("its states are elsewhere")

    monkeypatch.setattr("zero_plugin.strategies.xla.convert_weights_to_fp32", lambda request: None)
    monkeypatch.setattr("zero_plugin.strategies.xla.torch_optimizer", refuse)
    model, processes = nn.Linear(2, 2), Processes(0, 0, 1, torch.device("cpu"))
    request: Any = SimpleNamespace(model=model, is_placed=True)
    with pytest.raises(LoopError, match="elsewhere"):
        XlaStrategy(processes).build_session(request, processes)
    assert not model._forward_pre_hooks
    assert "forward" not in vars(model)


@pytest.mark.parametrize(
    ("said", "raised", "told"),
    [
        ("index < device_ready_queues_.size() INTERNAL ASSERT FAILED", LaunchError, "a backward\\(\\) ran before"),
        ("RESOURCE_EXHAUSTED: out of memory", RuntimeError, "^RESOURCE_EXHAUSTED: out of memory$"),
    ],
)
def test_a_first_backward_that_fails(
    monkeypatch: pytest.MonkeyPatch, said: str, raised: type[Exception], told: str
) -> None:
    """Only the autograd engine's own assertion shows that an earlier backward failed. tests/xla has the real one."""

    def fail(_: torch.Tensor) -> None:
        raise RuntimeError(said)

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("zero_plugin.distributed.processes.start_runtime", lambda: "TPU")
    monkeypatch.setattr(torch.Tensor, "backward", fail)
    with pytest.raises(raised, match=told):
        find_replica()
