"""Host memory, locked memory and /dev/shm."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

import zero_plugin.machine.memory
from zero_plugin.cli.doctor_machine import Needs, check_host_memory, check_locked_memory, check_shared_memory
from zero_plugin.machine.memory import lockable_bytes

GIB = 2**30
TWO = Needs(deepspeed=True, processes=2)
NVME = Needs(deepspeed=True, processes=2, nvme_folders=("/nvme",), locked_bytes=4 * GIB)
CPU = Needs(deepspeed=True, processes=2, offloads_to_host=True)


@pytest.mark.parametrize(
    ("limit", "needs", "level"),
    [
        (None, NVME, "ok"),
        (1 * GIB, NVME, "wrong"),
        (3 * GIB, NVME, "ok"),
        (64 * 2**10, Needs(nvme_folders=("/nvme",)), "warning"),
        (64 * 2**10, TWO, "ok"),
    ],
    ids=str,
)
def test_locked_memory(limit: int | None, needs: Needs, level: str) -> None:
    """The limit of each process against its share of what is locked; the fix raises it."""
    found = check_locked_memory(limit, needs)
    assert found.level == level
    assert level == "ok" or "ulimit -l unlimited" in found.fix


@pytest.mark.parametrize(
    ("size", "free", "needs", "level"),
    [
        (8 * GIB, 8 * GIB, TWO, "ok"),
        (64 * 2**20, 64 * 2**20, TWO, "warning"),
        (8 * GIB, 2**20, TWO, "warning"),
        (None, 0, TWO, "wrong"),
        (None, 0, Needs(), "warning"),
    ],
    ids=str,
)
def test_shared_memory(size: int | None, free: int, needs: Needs, level: str) -> None:
    """Docker's 64 MiB is too small, and a full one is as bad; several processes need it."""
    found = check_shared_memory(size, free, needs)
    assert found.level == level
    assert bool(found.fix) == (level != "ok")


def test_host_memory() -> None:
    """What is left counts where states are offloaded to it."""
    assert check_host_memory(64 * GIB, 2 * GIB, TWO).level == "ok"
    assert check_host_memory(64 * GIB, 32 * GIB, CPU).level == "ok"
    scarce = check_host_memory(64 * GIB, 2 * GIB, CPU)
    assert scarce.level == "warning"
    assert "nvme" in scarce.fix


@pytest.mark.parametrize(
    ("capabilities", "limit", "lockable"),
    [("0", 2**20, 2**20), ("4000", 2**20, None), ("0", resource.RLIM_INFINITY, None), ("1ffffffffff", 2**20, None)],
)
def test_who_may_lock_memory(
    capabilities: str, limit: int, lockable: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit does not bind a process with CAP_IPC_LOCK, which root has outside of most containers."""
    status = tmp_path / "status"
    status.write_text(f"Name:\tpython\nCapEff:\t{capabilities}\n")
    monkeypatch.setattr(zero_plugin.machine.memory, "_STATUS", status)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert lockable_bytes() == lockable
