"""The machine requirements of configurations, and the doctor's checks of them."""

from __future__ import annotations

import resource
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

import zero_plugin.machine.hardware
from zero_plugin.cli.doctor_machine import (
    Needs,
    check_disk,
    check_folders,
    check_gpus,
    check_host_memory,
    check_hostname,
    check_locked_memory,
    check_nodes,
    check_port,
    check_shared_memory,
    check_tpu,
    find_needs,
)
from zero_plugin.cli.output import Level
from zero_plugin.config.launch_settings import launch_settings
from zero_plugin.launch.flags import document_from_flags
from zero_plugin.machine.hardware import Disk, filesystem_of, lockable_bytes, look_at_disk

# ---- Requirements of configurations, read from real documents --------------------------------------------------------


ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}
NVME = {"device": "nvme", "nvme_path": "/data"}


def needs_of(folder: Path, deepspeed: dict[str, Any], gpus: int = 0, **launch: Any) -> Needs:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump({"distributed_type": "DEEPSPEED", **launch, "deepspeed_config": deepspeed}))
    document = document_from_flags({"config_file": str(file)})
    return find_needs(document, launch_settings(document), gpus)


@pytest.mark.parametrize(
    ("zero", "optimizer", "gpus", "ops"),
    [
        ({"stage": 2}, ADAM, 0, ()),
        ({"stage": 2}, ADAM, 2, ("fused_adam",)),
        ({"stage": 2}, {"type": "AdamW", "params": {"torch_adam": True}}, 2, ()),
        ({"stage": 2}, None, 2, ()),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, ADAM, 2, ("cpu_adam",)),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, None, 0, ("cpu_adam",)),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, {"type": "Lion"}, 0, ("cpu_lion",)),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, {"type": "Adagrad"}, 0, ("cpu_adagrad",)),
        ({"stage": "auto", "offload_optimizer": {"device": "auto"}}, ADAM, 2, ("cpu_adam", "fused_adam")),
        ({"stage": 3, "offload_param": NVME}, ADAM, 0, ("pin_memory", "async_io")),
        ({"stage": 3, "offload_optimizer": NVME}, ADAM, 0, ("cpu_adam", "pin_memory", "async_io")),
    ],
    ids=str,
)
def test_ops(
    zero: dict[str, Any], optimizer: dict[str, Any] | None, gpus: int, ops: tuple[str, ...], tmp_path: Path
) -> None:
    """Required ops depend on optimizer and device. NVMe needs asynchronous I/O."""
    training = {"zero_optimization": zero, **({"optimizer": optimizer} if optimizer else {})}
    assert needs_of(tmp_path, training, gpus).ops == ops


def test_no_kernel_is_built_where_torchs_own_is_offloaded(tmp_path: Path) -> None:
    """`zero_force_ds_cpu_optimizer: false` allows offload on a machine without a compiler."""
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    training = {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}
    assert needs_of(tmp_path, training, 0).ops == ()


def test_folders_and_locked_memory(tmp_path: Path) -> None:
    """Each folder counts once. Locked memory counts every process's swap buffers, in the training dtype."""
    zero = {"stage": 3, "offload_optimizer": NVME, "offload_param": {**NVME, "buffer_count": 4, "buffer_size": 1000}}
    needs = needs_of(tmp_path, {"zero_optimization": zero, "bf16": {"enabled": True}}, num_processes=3)
    assert needs.nvme_folders == ("/data",)
    assert needs.locked_bytes == 3 * 4 * 1000 * 2
    assert needs_of(tmp_path, {"zero_optimization": zero}, num_processes=3).locked_bytes == 3 * 4 * 1000 * 4


def test_a_run_without_zero_needs_nothing_of_deepspeed(tmp_path: Path) -> None:
    """DDP needs nothing of DeepSpeed, even if the document has a ZeRO section."""
    needs = needs_of(tmp_path, {"zero_optimization": {"stage": 2}}, distributed_type="MULTI_CPU", num_processes=2)
    assert needs == Needs(processes=2)


def test_processes_are_those_of_this_machine(tmp_path: Path) -> None:
    """Eight processes on two machines are four here. Without a number, each GPU gets one."""
    zero = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    several = {"num_machines": 2, "machine_rank": 0, "main_process_ip": "10.0.0.1"}
    assert needs_of(tmp_path, zero, num_processes=8, **several).processes == 4
    assert needs_of(tmp_path, zero, gpus=3).processes == 3
    assert needs_of(tmp_path, zero, gpus=3).offloads_to_host


# ---- CPU memory, locked memory and /dev/shm --------------------------------------------------------------------------


GIB = 2**30
TWO = Needs(deepspeed=True, processes=2)
SWAPS = Needs(deepspeed=True, processes=2, nvme_folders=("/nvme",), locked_bytes=4 * GIB)
OFFLOADS = Needs(deepspeed=True, processes=2, offloads_to_host=True)


@pytest.mark.parametrize(
    ("limit", "needs", "level"),
    [
        (None, SWAPS, "ok"),
        (1 * GIB, SWAPS, "wrong"),
        (3 * GIB, SWAPS, "ok"),
        (64 * 2**10, Needs(nvme_folders=("/nvme",)), "warning"),
        (64 * 2**10, TWO, "ok"),
    ],
    ids=str,
)
def test_locked_memory(limit: int | None, needs: Needs, level: str) -> None:
    """Each process's limit is compared with its part of the locked memory. The fix raises the limit."""
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
    """Docker's 64 MiB of /dev/shm, or a full /dev/shm, is an error for several processes."""
    found = check_shared_memory(size, free, needs)
    assert found.level == level
    assert bool(found.fix) == (level != "ok")


def test_host_memory() -> None:
    """Free CPU memory is checked if states are offloaded to it."""
    assert check_host_memory(64 * GIB, 2 * GIB, TWO).level == "ok"
    assert check_host_memory(64 * GIB, 32 * GIB, OFFLOADS).level == "ok"
    scarce = check_host_memory(64 * GIB, 2 * GIB, OFFLOADS)
    assert scarce.level == "warning"
    assert "nvme" in scarce.fix


@pytest.mark.parametrize(
    ("capabilities", "limit", "lockable"),
    [("0", 2**20, 2**20), ("4000", 2**20, None), ("0", resource.RLIM_INFINITY, None), ("1ffffffffff", 2**20, None)],
)
def test_who_may_lock_memory(
    capabilities: str, limit: int, lockable: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process with CAP_IPC_LOCK has no limit. Root has it outside most containers."""
    status = tmp_path / "status"
    status.write_text(f"Name:\tpython\nCapEff:\t{capabilities}\n")
    monkeypatch.setattr(zero_plugin.machine.hardware, "_STATUS", status)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert lockable_bytes() == lockable


# ---- A folder for NVMe offload ---------------------------------------------------------------------------------------


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
    """File system, free space and speed are reported, each with a fix if it is not ok."""
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
    """The innermost mount counts, and of two mounts on one point the later one. Escaped blanks in names are read."""
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS.lstrip())
    assert filesystem_of(Path(folder), mounts) == kind
    assert filesystem_of(Path(folder), tmp_path / "absent") == "unknown"


def test_a_real_folder_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    """Measuring a real folder takes about a second, leaves no file, and does not create the folder."""
    began = time.monotonic()
    disk = look_at_disk(tmp_path / "not" / "there")
    assert time.monotonic() - began < 10  # limit against hanging
    assert disk is not None
    assert disk.free > 0
    assert list(tmp_path.iterdir()) == []
    if disk.direct:
        assert disk.write is not None
        assert disk.read is not None
        assert min(disk.write, disk.read) > 0


def test_a_folder_where_nothing_can_be_made() -> None:
    """No user can create a folder in /proc."""
    assert look_at_disk(Path("/proc/zero_plugin")) is None


# ---- Folders, the machine's name, ports, memory nodes and GPUs -------------------------------------------------------


CPU = Needs(deepspeed=True, offloads_to_host=True)


def test_folders(tmp_path: Path) -> None:
    """A writable folder is ok. A missing, unset or unwritable one is not."""
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
    """A host name without an address, or with a loopback address, is an error for several machines."""
    found = check_hostname(name, machines=machines)
    assert found.level == level
    assert bool(found.fix) == (level != "ok")


def test_port() -> None:
    """A port in use is an error, and the fix shows the process that uses it."""
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
    """With several memory nodes and states in CPU memory, binding is recommended."""
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
    """If the driver has GPUs that torch does not see, the cause is named."""
    found = check_gpus(names, {}, driver=driver, torch_cuda=torch_cuda, requested=asked)
    assert found.level == level
    assert fix in found.fix
    assert not names or found.found == "2 × H200"


def test_hidden_gpus() -> None:
    """A `CUDA_VISIBLE_DEVICES` that hides all GPUs is named as the cause."""
    found = check_gpus([], {"CUDA_VISIBLE_DEVICES": ""}, driver=True, torch_cuda=True, requested="gpu_ids is 0")
    assert found.fix == "unset CUDA_VISIBLE_DEVICES"


# ---- The doctor's line about the TPU: torch_xla, its device, and the command that fixes a problem --------------------


CHIPS = "4 TPU chips on the PCI bus"
MISSING = "a TPU needs torch_xla, which is not installed: pip install 'zero-plugin[tpu]'"


@pytest.mark.parametrize(
    ("seen", "environ", "asked", "problem", "level", "parts"),
    [
        ("", {}, False, MISSING, "ok", ["none"]),
        (CHIPS, {}, False, MISSING, "warning", [CHIPS, "pip install 'zero-plugin[tpu]'"]),
        (CHIPS, {}, True, MISSING, "wrong", ["not installed", "pip install 'zero-plugin[tpu]'"]),
        (CHIPS, {}, True, "", "ok", [CHIPS]),
        ("", {}, True, "", "wrong", ["there is no TPU here", "PJRT_DEVICE=CPU"]),
        ("", {"PJRT_DEVICE": "CPU"}, True, "", "warning", ["PJRT_DEVICE is CPU", "unset PJRT_DEVICE"]),
        ("", {"PJRT_DEVICE": "CUDA"}, True, "", "wrong", ["no TPU here, and PJRT_DEVICE is CUDA"]),
    ],
)
def test_what_is_there_against_what_is_asked(
    monkeypatch: pytest.MonkeyPatch,
    seen: str,
    environ: dict[str, str],
    asked: bool,
    problem: str,
    level: Level,
    parts: list[str],
) -> None:
    """A missing TPU is an error only if the configuration requests one. Each problem has a command to type."""
    monkeypatch.setattr("zero_plugin.cli.doctor_machine.find_version_problem", lambda: problem)
    found = check_tpu(seen, environ, requested=asked)
    assert found.level == level
    assert bool(found.fix) == (level != "ok")
    for part in parts:
        assert part in f"{found.found}\n{found.fix}"
