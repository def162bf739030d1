"""CPU memory and cores: one reader for all callers, correct inside nested control groups."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from zero_plugin.big_models.placement import get_max_memory
from zero_plugin.cli.doctor import env, examine
from zero_plugin.config.launch_settings import launch_settings
from zero_plugin.config.read import document_from_mapping
from zero_plugin.config.resolve.facts import Facts, LoopFacts, MachineFacts
from zero_plugin.config.resolve.resolve import resolve
from zero_plugin.launch.build import _find_cluster
from zero_plugin.launch.report import FirstFailure, describe_failure
from zero_plugin.loop.memory_check import find_available_memory
from zero_plugin.loop.out_of_memory import FailedLoop, describe_out_of_memory
from zero_plugin.machine import hardware
from zero_plugin.machine.hardware import Meter, count_cores, memory_available_bytes
from zero_plugin.plan.speeds import measure_cluster

CPU = torch.device("cpu")
GIB = 2**30
NO_LIMIT_V1 = 2**63 - 4096
V2, V1 = "system.slice/slurmstepd.scope/job_7/step_0/user/task_0", "slurm/uid_1000/job_7/step_0"
Limits = dict[str, dict[str, int | str]]  # files of a control group, by its folder


def machine(
    tree: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: int,
    own: str,
    groups: Limits,
    root: str = "",
    controller: str = "memory",
) -> None:
    """Simulate a machine of 512 GiB (500 available) and 16 cores, with control groups of one version.

    Args:
        tree: folder for its files.
        monkeypatch: points the reader to the files.
        version: version of the control groups.
        own: this process's group.
        groups: the groups' files by folder; "" is the root.
        root: the mounted group, as in a container that sees only its own.
        controller: version 1's controller: `memory` or `cpu,cpuacct`. The other one's files are elsewhere.
    """
    proc, mount = tree / "proc", tree / "cgroup"
    (proc / "self").mkdir(parents=True)
    others = ("Buffers", "Cached", "Shmem", "Active", "Inactive")  # psutil warns without
    sizes = {"MemTotal": 512, "MemFree": 400, "MemAvailable": 500, **dict.fromkeys(others, 1)}
    (proc / "meminfo").write_text("".join(f"{name}: {size * 2**20} kB\n" for name, size in sizes.items()))
    other = "memory" if controller == "cpu,cpuacct" else "cpu,cpuacct"
    controllers, kind, options = ("", "cgroup2", "rw") if version == 2 else (controller, "cgroup", f"rw,{controller}")
    (proc / "self" / "cgroup").write_text(f"9:{other}:/elsewhere\n4:{controllers}:/{own}\n")
    (proc / "self" / "mountinfo").write_text(
        f"30 20 0:1 / / rw - ext4 /dev/root rw\n31 30 0:2 /{root} {mount} rw,nosuid - {kind} {kind} {options}\n"
        f"32 30 0:3 / {tree} rw - cgroup cgroup rw,{other}\n"
    )
    for group, files in groups.items():
        folder = mount / Path(group).relative_to(root)
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_text(f"{content}\n")
    monkeypatch.setattr(hardware, "PROC", proc)
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(proc))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)


def group(version: int, limit: int | None, taken: int, cached: int = 0, **stat: int) -> dict[str, int | str]:
    """Return files of a control group: its limit, its usage, the cached part of it, and more of `memory.stat`."""
    names = {"inactive_file": cached, **stat}
    if version == 2:
        return {
            "memory.max": "max" if limit is None else limit,
            "memory.high": "max",
            "memory.current": taken,
            "memory.stat": "\n".join(["anon 1", f"file {cached}", *(f"{n} {size}" for n, size in names.items())]),
        }
    own = [f"{name} 1" for name in ("cache", *names)]  # without the usage of child groups
    return {
        "memory.limit_in_bytes": NO_LIMIT_V1 if limit is None else limit,
        "memory.usage_in_bytes": taken,
        "memory.stat": "\n".join([*own, *(f"total_{n.removeprefix('file_')} {size}" for n, size in names.items())]),
    }


def slurm_job(version: int) -> tuple[str, Limits]:
    """Return a task's group and its parents. The job may use 64 GiB; 20 are used, of which 4 are cached files."""
    own = Path(V2 if version == 2 else V1)
    folders = [str(folder) for folder in (own, *own.parents) if folder.name]
    groups = {folder: group(version, None, 2 * GIB, GIB) for folder in folders}
    groups[next(folder for folder in folders if folder.endswith("job_7"))] = group(version, 64 * GIB, 20 * GIB, 4 * GIB)
    return str(own), groups


@pytest.fixture(params=[2, 1], ids=["v2", "v1"])
def job(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Simulate a job of 64 GiB, of which 48 are available, on a node of 512 GiB."""
    machine(tmp_path, monkeypatch, request.param, *slurm_job(request.param))
    return int(request.param)


RESOLVED = resolve(document_from_mapping({"use_cpu": True}, "code"), Facts(LoopFacts(4, "the loader"), MachineFacts()))
LAUNCH = document_from_mapping({"gpu_memory": "80GiB"}, "code")
LOOP = FailedLoop(trains=True, micro_batch=8, accumulation=1, cut=1, is_open=False, decides=False, savings=())
USERS: dict[str, Callable[[], int]] = {
    "plan": lambda: measure_cluster(1).host_bytes,
    "plan without a GPU": lambda: 2 * measure_cluster(2).device_bytes,
    "launch with a stated GPU": lambda: _find_cluster(LAUNCH, launch_settings(LAUNCH), 1).host_bytes,
    "memory check": lambda: find_available_memory(RESOLVED).cpu,
    "big models": lambda: int(get_max_memory()["cpu"]),
    "log": lambda: round(Meter(1, CPU).read(1, "samples")["memory_available_gb"] * 1e9),
    "device": lambda: memory_available_bytes(CPU),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's own memory is planned with")
@pytest.mark.parametrize("user", USERS)
@pytest.mark.usefixtures("job")
def test_everyone_has_the_jobs_memory(user: str) -> None:
    """Every caller sees the job's available memory, not the node's."""
    assert USERS[user]() == hardware.available_cpu_memory() == 48 * GIB


@pytest.mark.usefixtures("job")
def test_messages_have_the_jobs_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """doctor, env, the launcher after a kill, and an out-of-memory run print the job's memory."""
    assert hardware.total_cpu_memory() == 64 * GIB
    findings = {finding.check: finding for finding in examine(document_from_mapping({}, "code"), {}, build=False)}
    assert findings["CPU memory"].found.startswith("48 GiB of 64 GiB free")
    env()
    assert "CPU memory    64 GiB" in capsys.readouterr().out
    assert "(64 GiB here, for all processes together)" in describe_failure(FirstFailure(0, -9))
    assert "48 GiB are available" in describe_out_of_memory(MemoryError(), LOOP, CPU, rank=0).headline


@pytest.mark.parametrize("version", [2, 1])
@pytest.mark.parametrize(("limit", "total", "left"), [(None, 512, 500), (1000, 512, 500), (8, 8, 0), (100, 100, 90)])
def test_the_limit_of_the_own_group(
    version: int, limit: int | None, total: int, left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing limit, a limit above the machine's memory, an exceeded limit, and a normal one are handled."""
    size = None if limit is None else limit * GIB
    machine(tmp_path, monkeypatch, version, "a", {"a": group(version, size, 12 * GIB, 2 * GIB)})
    assert hardware.total_cpu_memory() == total * GIB
    assert hardware.available_cpu_memory() == left * GIB


@pytest.mark.parametrize("version", [2, 1])
def test_cached_files_can_be_had(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached files count as available, active ones too. Dirty pages, RAM disks and locked memory do not."""
    stat = {"active_file": 4, "file_dirty": 2, "file_writeback": 1, "shmem": 8, "unevictable": 16, "inactive_anon": 8}
    files = group(version, 64 * GIB, 60 * GIB, 3 * GIB, **{name: size * GIB for name, size in stat.items()})
    machine(tmp_path, monkeypatch, version, "a", {"a": files})
    assert hardware.available_cpu_memory() == (64 - 60 + 3 + 4 - 2 - 1) * GIB


def quota(version: int, cores: float | None) -> dict[str, int | str]:
    """Return files of a control group with a quota of cores."""
    of_period = None if cores is None else int(cores * 100_000)
    if version == 2:
        return {"cpu.max": f"{of_period or 'max'} 100000", "cpu.weight": 100}
    return {"cpu.cfs_quota_us": of_period or -1, "cpu.cfs_period_us": 100_000, "cpu.shares": 1024}


@pytest.mark.parametrize("version", [2, 1])
@pytest.mark.parametrize(
    ("quotas", "cores"),
    [
        ({"job": 4, "job/step": None}, 4),
        ({"job": 8, "job/step": 2.5}, 3),
        ({"job": 2, "job/step": 4}, 2),
        ({"job": 0.5, "job/step": None}, 1),
        ({"job": 64, "job/step": None}, 16),
        ({"job": None, "job/step": None}, 16),
        ({"job/step": 6}, 6),
    ],
)
def test_the_quotas_of_all_groups_count(
    version: int,
    quotas: dict[str, float | None],
    cores: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The smallest quota of nested groups counts, rounded up to complete cores, at least one."""
    groups = {name: quota(version, count) for name, count in quotas.items()}
    machine(tmp_path, monkeypatch, version, "job/step", groups, controller="cpu,cpuacct")
    assert count_cores() == cores


@pytest.mark.parametrize("version", [2, 1])
def test_the_cores_of_a_container(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's own group is mounted as the root. A sibling group does not count."""
    groups = {"docker/c": quota(version, 3), "docker/c/other": quota(version, 1)}
    machine(tmp_path, monkeypatch, version, "docker/c", groups, root="docker/c", controller="cpu,cpuacct")
    assert count_cores() == 3


def test_every_level_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest total and smallest rest may be of different groups. Above `memory.high` a process is slowed down."""
    groups = {"a": group(2, 64 * GIB, 60 * GIB), "a/b": group(2, 32 * GIB, 4 * GIB), "": {"memory.stat": "anon 1"}}
    machine(tmp_path, monkeypatch, 2, "a/b", groups)
    assert (hardware.total_cpu_memory(), hardware.available_cpu_memory()) == (32 * GIB, 4 * GIB)
    (tmp_path / "cgroup/a/b/memory.high").write_text(f"{6 * GIB}\n")
    assert (hardware.total_cpu_memory(), hardware.available_cpu_memory()) == (6 * GIB, 2 * GIB)


@pytest.mark.parametrize(("own", "total"), [("docker/c", 16), ("docker/c/job", 8)])
@pytest.mark.parametrize("version", [2, 1])
def test_a_container(version: int, own: str, total: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's own group is mounted as the root, while its processes may see the path on the host."""
    groups = {"docker/c": group(version, 16 * GIB, GIB), "docker/c/job": group(version, 8 * GIB, GIB)}
    machine(tmp_path, monkeypatch, version, own, groups, root="docker/c")
    assert (hardware.total_cpu_memory(), hardware.available_cpu_memory()) == (total * GIB, (total - 1) * GIB)


@pytest.mark.parametrize("own", ["../outside", "gone"])
def test_a_group_that_cannot_be_seen(own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a group cannot be read, its readable parents count."""
    machine(tmp_path, monkeypatch, 2, own, {"": group(2, 16 * GIB, GIB)})
    assert hardware.available_cpu_memory() == 15 * GIB


def test_the_limit_of_address_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `ulimit -v`, this process's mapped memory counts as used."""
    mapped = psutil.Process().memory_info().vms
    limit = mapped + 2**20
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert hardware.total_cpu_memory() == min(limit, psutil.virtual_memory().total)
    assert hardware.available_cpu_memory() <= 2**20


def test_this_machine() -> None:
    """On this machine some memory and cores are left."""
    assert 0 < hardware.available_cpu_memory() < hardware.total_cpu_memory() <= psutil.virtual_memory().total
