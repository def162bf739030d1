"""A folder for NVMe offload."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from zero_plugin.cli.doctor_machine import check_disk
from zero_plugin.machine.disks import Disk, filesystem_of, look_at_disk

GOOD = Disk("ext4", 10**12, True, 2e9, 3e9)


@pytest.mark.parametrize(
    ("disk", "levels"),
    [
        (GOOD, ["ok", "ok", "ok"]),
        (Disk("tmpfs", 10**12, True, 9e9, 9e9), ["wrong", "ok", "ok"]),
        (Disk("tmpfs", 10**12, False), ["wrong", "ok"]),
        (Disk("nfs4", 10**12, True, 9e8, 9e8), ["warning", "ok", "ok"]),
        (Disk("overlay", 10**12, False), ["wrong", "ok"]),
        (Disk("ext4", 10**9, True, 2e9, 2e9), ["ok", "warning", "ok"]),
        (Disk("ext4", 10**12, True, 1e8, 2e9), ["ok", "ok", "warning"]),
        (None, ["wrong"]),
    ],
    ids=str,
)
def test_findings(disk: Disk | None, levels: list[str]) -> None:
    """File system, room and speed, each with a fix where it is not well."""
    found = list(check_disk("/data", disk))
    assert [finding.level for finding in found] == levels
    assert all(bool(finding.fix) == (finding.level != "ok") for finding in found)
    assert all("/data" in finding.check for finding in found)


MOUNTS = r"""
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:26 / /mnt rw shared:5 - tmpfs tmpfs rw
31 30 0:27 / /mnt/my\040disk rw shared:6 - xfs /dev/nvme0n1 rw
32 22 0:28 / /data rw - ext4 /dev/sdb rw
33 32 0:29 / /data rw - nfs4 server:/data rw
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [("/mnt/my disk/a", "xfs"), ("/mnt", "tmpfs"), ("/mntother", "ext4"), ("/data/x", "nfs4"), ("/", "ext4")],
)
def test_the_file_system_is_that_of_the_innermost_mount(folder: str, kind: str, tmp_path: Path) -> None:
    """Blanks in names are read as the kernel writes them, and the later of two mounts on one point counts."""
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS.lstrip())
    assert filesystem_of(Path(folder), mounts) == kind
    assert filesystem_of(Path(folder), tmp_path / "absent") == "unknown"


def test_a_real_folder_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    """In about a second, with no file left, and without making the folder."""
    began = time.monotonic()
    disk = look_at_disk(tmp_path / "not" / "there")
    assert time.monotonic() - began < 10  # a bound against hanging
    assert disk is not None
    assert disk.free > 0
    assert list(tmp_path.iterdir()) == []
    if disk.direct:
        assert disk.write is not None
        assert disk.read is not None
        assert min(disk.write, disk.read) > 0


def test_a_folder_where_nothing_can_be_made() -> None:
    """/proc takes no file, whoever asks."""
    assert look_at_disk(Path("/proc/zero_plugin")) is None
