"""How much memory is left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zero_plugin.machine import device_memory as meter

CPU = torch.device("cpu")


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 1000 kB available, and a container without a limit."""
    (tmp_path / "meminfo").write_text("MemTotal:       2000 kB\nMemAvailable:   1000 kB\nHugePages_Free:     0\n")
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("500000\n")
    (tmp_path / "memory.stat").write_text("anon 100000\nactive_file 150000\ninactive_file 150000\nslab_reclaimable 1\n")
    monkeypatch.setattr(meter, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(meter, "_CGROUP", tmp_path)
    return tmp_path


def test_the_machines_memory(cgroup: Path) -> None:
    """Where the container has no limit, or there is none; unknown off Linux."""
    assert meter.memory_available_bytes(CPU) == 1_024_000
    (cgroup / "memory.max").unlink()
    assert meter.memory_available_bytes(CPU) == 1_024_000
    (cgroup / "meminfo").unlink()
    assert meter.memory_available_bytes(CPU) is None


@pytest.mark.parametrize(("limit", "left"), [(600_000, 400_000), (100_000, 0), (10**9, 1_024_000)])
def test_the_containers_limit(cgroup: Path, limit: int, left: int) -> None:
    """Less what it holds, but for cached files."""
    (cgroup / "memory.max").write_text(f"{limit}\n")
    assert meter.memory_available_bytes(CPU) == left
