"""Folders, the machine's name, ports, memory nodes and GPUs."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from zero_plugin.cli.doctor_machine import Needs, check_folders, check_gpus, check_hostname, check_nodes, check_port

CPU = Needs(deepspeed=True, offloads_to_host=True)


def test_folders(tmp_path: Path) -> None:
    """One that can be written is well; one that is missing, takes no file or is not set is not."""
    good = {"TMPDIR": str(tmp_path), "HOME": str(tmp_path)}
    assert [f.level for f in check_folders(good)] == ["ok", "ok"]
    assert [f.level for f in check_folders({**good, "TMPDIR": str(tmp_path / "absent")})] == ["wrong", "ok"]
    assert [f.level for f in check_folders({**good, "HOME": "/proc"})] == ["ok", "wrong"]
    (temporary, home) = check_folders({"TMPDIR": "/proc"})
    assert "export TMPDIR=" in temporary.fix
    assert (home.level, "export HOME=" in home.fix) == ("warning", True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "machines", "level"),
    [
        ("localhost", 1, "ok"),
        ("localhost", 2, "warning"),
        ("no-such-host.invalid", 1, "warning"),
        ("no-such-host.invalid", 2, "wrong"),
    ],
    ids=str,
)
def test_hostname(name: str, machines: int, level: str) -> None:
    """A name without an address, or with one that only this machine reaches, hinders several machines."""
    found = check_hostname(name, machines=machines)
    assert found.level == level
    assert bool(found.fix) == (level != "ok")


def test_port() -> None:
    """A taken one is wrong, and the fix shows by whom it is taken."""
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        taken = check_port(port)
    assert taken.level == "wrong"
    assert f"sport = :{port}" in taken.fix
    assert check_port(port).level == "ok"
    assert check_port(None).level == "ok"


NODES = {0: frozenset(range(4)), 1: frozenset(range(4, 8))}


def test_memory_nodes() -> None:
    """Several nodes are worth binding to where states are in CPU memory."""
    assert check_nodes({0: frozenset(range(8))}, CPU).level == "ok"
    assert check_nodes({}, CPU).level == "ok"
    assert check_nodes(NODES, Needs()).level == "ok"
    assert check_nodes(NODES, Needs(offloads_to_host=True, binds_cores=True)).level == "ok"
    found = check_nodes(NODES, CPU)
    assert found.level == "warning"
    assert "1: cores 4-7" in found.found
    assert "--enable_cpu_affinity" in found.fix


@pytest.mark.parametrize(
    ("names", "driver", "torch_cuda", "asked", "level", "fix"),
    [
        (["H200", "H200"], True, True, "", "ok", ""),
        ([], False, False, "", "ok", ""),
        ([], False, False, "distributed_type is MULTI_GPU", "warning", "use_cpu"),
        ([], True, False, "", "warning", "pip install torch"),
        ([], True, False, "gpu_ids is 0", "wrong", "pip install torch"),
        ([], True, True, "gpu_ids is 0", "wrong", "nvidia-smi"),
    ],
    ids=str,
)
def test_gpus(names: list[str], driver: bool, torch_cuda: bool, asked: str, level: str, fix: str) -> None:
    """A driver whose GPUs torch does not see is told by its cause."""
    found = check_gpus(names, {}, driver=driver, torch_cuda=torch_cuda, requested=asked)
    assert found.level == level
    assert fix in found.fix
    assert not names or found.found == "2 × H200"


def test_hidden_gpus() -> None:
    """`CUDA_VISIBLE_DEVICES` that hides all is the cause."""
    found = check_gpus([], {"CUDA_VISIBLE_DEVICES": ""}, driver=True, torch_cuda=True, requested="gpu_ids is 0")
    assert found.fix == "unset CUDA_VISIBLE_DEVICES"
