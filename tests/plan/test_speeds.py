"""This machine's constants: measured once, kept in a file, each with its source."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zero_plugin.plan import speeds
from zero_plugin.plan.situation import Cluster
from zero_plugin.plan.speeds import constants_file, measure_cluster

GPU = torch.cuda.is_available()


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with this machine's constants, measured once for all tests that only need some."""
    cache = tmp_path_factory.mktemp("measured") / "constants.json"
    measure_cluster(cache=cache)
    return cache


def test_measured_once(tmp_path: Path) -> None:
    """The file's values are used unchanged. Every speed is present, is positive, and has its source."""
    cache = tmp_path / "deep" / "constants.json"
    first = measure_cluster(processes=2, nodes=3, cache=cache)
    assert (first.devices, first.nodes, first.processes) == (2, 3, 6)
    speeds = [f.name for f in fields(Cluster) if f.name.endswith("bandwidth") or f.name == "flops"]
    for name in speeds:
        value = getattr(first, name)
        assert all(v > 0 for v in (value.values() if name == "flops" else [value]))
        assert first.sources[name]
    assert "measured now" in first.sources["adam_bandwidth"]
    kept = json.loads(cache.read_text())
    (machine,) = kept
    kept[machine]["speeds"]["adam"] = 12345.0
    cache.write_text(json.dumps(kept))
    second = measure_cluster(cache=cache)
    assert second.adam_bandwidth == 12345.0
    assert second.flops == first.flops
    assert "measured on 20" in second.sources["adam_bandwidth"]


@pytest.mark.parametrize("damage", ["[]", "{"])
def test_damaged_file_is_measured_anew(tmp_path: Path, damage: str) -> None:
    """A file that cannot be parsed costs a measurement, and is replaced."""
    cache = tmp_path / "constants.json"
    cache.write_text(damage)
    assert "measured now" in measure_cluster(cache=cache).sources["adam_bandwidth"]
    assert "measured on" in measure_cluster(cache=cache).sources["adam_bandwidth"]


@pytest.mark.parametrize("here", [{}, {"speeds": []}], ids=["not measured", "damaged"])
def test_other_machines_keep_their_measurements(measured: Path, tmp_path: Path, here: dict[str, Any]) -> None:
    """Many nodes share a home folder. Measuring one keeps the file's values of the others."""
    (machine,) = json.loads(measured.read_text())
    cache = tmp_path / "constants.json"
    cache.write_text(json.dumps({"another": {"day": "2020-01-01", "speeds": {}}} | ({machine: here} if here else {})))
    assert "measured now" in measure_cluster(cache=cache).sources["adam_bandwidth"]
    kept = json.loads(cache.read_text())
    assert kept.keys() == {"another", machine}
    assert kept["another"]["day"] == "2020-01-01"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="one thread is all there is")
def test_the_update_is_measured_on_the_whole_node(tmp_path: Path) -> None:
    """The plan divides it among a node's processes, so all cores take part. The process's own threads are restored."""
    found = set()
    hook = register_optimizer_step_pre_hook(lambda *_: found.add(torch.get_num_threads()))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        measure_cluster(cache=tmp_path / "constants.json")
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
        hook.remove()
    assert found == {len(os.sched_getaffinity(0))}


@pytest.mark.skipif(GPU, reason="a GPU is there")
def test_cpu_shares_one_memory(measured: Path) -> None:
    """Without a GPU the processes of a node share its memory: device and host are the same."""
    cluster = measure_cluster(processes=4, cache=measured)
    assert cluster.device_name == "CPU"
    assert cluster.device_bytes == cluster.host_bytes // 4


class Driver:
    """A machine's driver as NVML shows it: the active links and their version."""

    class NVMLError(Exception):
        pass

    NVML_NVLINK_MAX_LINKS, NVML_FEATURE_ENABLED = 18, 1

    def __init__(self, active: int, version: int) -> None:
        self.active, self.version = active, version

    def nvmlInit(self) -> None:
        if self.version == 0:
            raise self.NVMLError

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert uuid == "GPU-1234"
        return uuid

    def nvmlDeviceGetNvLinkState(self, _: str, link: int) -> int:
        if link >= 12:
            raise self.NVMLError
        return int(link < self.active)

    def nvmlDeviceGetNvLinkVersion(self, _: str, link: int) -> int:
        return self.version


@pytest.mark.parametrize(
    ("driver", "bandwidth", "source"),
    [
        (Driver(12, 4), 300e9, "12 active NVLinks"),  # A100's sheet: 600 GB/s, both directions together
        (Driver(4, 1), 80e9, "4 active NVLinks"),  # P100's: 160
        (Driver(12, 7), 600e9, "12 active NVLinks"),
        (Driver(0, 4), 10e9, "reports no active NVLink"),
        (Driver(12, 0), 300e9, "A100-80GB's data sheet"),
        (None, 300e9, "A100-80GB's data sheet; install nvidia-ml-py"),
    ],
    ids=["A100", "P100", "newer", "none", "no driver", "no library"],
)
def test_links_of_a_live_machine(
    driver: Driver | None, bandwidth: float, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver gives the links. Without it or its library, the data sheet of the name does."""
    monkeypatch.setattr(speeds, "installed_version", lambda _: None if driver is None else "13")
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1234"))
    found = speeds._link_bandwidth(torch.device("cuda"), "NVIDIA A100-SXM4-80GB", {"pcie": 20e9})
    assert found[0] == bandwidth
    assert source in found[1]


def test_disk(measured: Path, tmp_path: Path) -> None:
    """A folder for NVMe offload has free bytes and speeds. No file of the measurement stays there."""
    folder = tmp_path / "nvme"
    folder.mkdir()
    cluster = measure_cluster(nvme_path=folder, cache=measured)
    assert cluster.nvme_bytes > 0
    assert cluster.nvme_read > 0 < cluster.nvme_write
    assert not list(folder.iterdir())


def test_file_is_in_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`XDG_CACHE_HOME` sets the file's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert constants_file() == tmp_path / "zero_plugin" / "constants.json"
