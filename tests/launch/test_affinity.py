"""Cores of each process, from trees that look like the kernel's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zero_plugin.launch.worker import bind_to_cores
from zero_plugin.machine.hardware import choose_cores, find_gpus, number_ranges, read_nodes

GPUS = ("0000:1b:00.0", "0000:3d:00.0", "0000:9b:00.0")


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """Two NUMA nodes with eight cores each, a third with memory only; one GPU near node 0, two near node 1."""
    for node, cores in {0: "0-3,8-11", 1: "4-7,12-15", 2: ""}.items():
        folder = tmp_path / "devices" / "system" / "node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    for gpu, node in zip(GPUS, (0, 1, 1), strict=True):
        folder = tmp_path / "bus" / "pci" / "devices" / gpu
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    return tmp_path


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    """Simulate NVIDIA's list of GPUs."""
    for number, gpu in enumerate(GPUS):
        folder = tmp_path / "gpus" / gpu
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t A\nGPU UUID: \t GPU-{number}a\nBus Type: \t PCIe\n")
    return tmp_path / "gpus"


ALL = range(16)
NODE_0, NODE_1 = "0-3,8-11", "4-7,12-15"


@pytest.mark.parametrize(
    ("processes", "gpus", "allowed", "expected", "reason"),
    [
        (3, GPUS, ALL, [NODE_0, NODE_1, NODE_1], "NUMA node of its GPU"),
        (4, (), ALL, [NODE_0, NODE_0, NODE_1, NODE_1], "even share of 2"),
        (3, (), ALL, [NODE_0, NODE_0, NODE_1], "even share"),
        (1, (), ALL, ["0-15"], "even share"),
        (2, (GPUS[0], None), ALL, [NODE_0, NODE_1], "the GPUs' own are not known"),
        (2, (), [0, 1, 4, 5], ["0-1", "4-5"], "even share"),
        (2, (), [0, 1], [], "one NUMA node"),
    ],
    ids=str,
)
def test_cores(
    processes: int, gpus: tuple[str | None, ...], allowed: list[int], expected: list[str], reason: str, system: Path
) -> None:
    """A process gets its GPU's node if known, otherwise an even share of the allowed cores.

    On one node nothing is bound.
    """
    binding = choose_cores(processes, gpus, allowed, system)
    assert [number_ranges(cores) for cores in binding.cores] == expected
    assert reason in binding.reason


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    """Without the kernel's tree no process is bound."""
    assert read_nodes(tmp_path) == {}
    assert choose_cores(2, (), ALL, tmp_path).cores == ()


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, GPUS),
        ("2,0", (GPUS[2], GPUS[0], None)),
        ("GPU-1a", (GPUS[1], None, None)),
        ("7,GPU-x", (None, None, None)),
    ],
)
def test_the_gpu_of_each_process(visible: str | None, expected: tuple[str | None, ...], driver: Path) -> None:
    """GPUs follow the driver's order, limited to those in `CUDA_VISIBLE_DEVICES`, by number or by name."""
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert find_gpus(3, environ, driver) == expected


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no process")
def test_binding_what_the_launcher_wrote() -> None:
    """A worker reads the launcher's list and ignores cores that it may not use."""
    before = os.sched_getaffinity(0)
    try:
        bind_to_cores(number_ranges({min(before)}))
        assert os.sched_getaffinity(0) == {min(before)}
    finally:
        os.sched_setaffinity(0, before)
