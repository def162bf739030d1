"""A run's surroundings fail: output reader, port, host name, memory, disk. The run ends soon and says why."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import Workers, needs_proc

pytestmark = [
    pytest.mark.programs,
    pytest.mark.processes,
    pytest.mark.timeout(1200),
    needs_proc,
]

Start = Callable[..., "subprocess.Popen[str]"]
Tried = Callable[..., dict[str, Any]]
OFFLOADS = Path(__file__).parent / "offloads.py"
MEMORY = Path("/sys/fs/cgroup/memory")  # of control groups, version 1
UNIFIED = Path("/sys/fs/cgroup")

TALKS = """
import sys
from zero_plugin import Accelerator
accelerator = Accelerator()
for number in range(100_000):
    accelerator.print("line", number, flush=True)
"""
EATS = """
import time, torch
from zero_plugin import Accelerator
accelerator = Accelerator()
kept = []
while accelerator.process_index == 1:
    kept.append(torch.ones(10_000_000))
    time.sleep(0.02)
accelerator.wait_for_everyone()
"""


def expect(
    launcher: subprocess.Popen[str], row: dict[str, Any], workers: Workers, code: int, *words: str
) -> tuple[str, float]:
    """Assert the facts about a run's end. Return stderr and the seconds."""
    began = time.monotonic()
    errors = workers.finish(launcher)
    row["ended in time"], row["slowest s"] = 1, time.monotonic() - began
    assert launcher.returncode == code, errors
    for text in words:
        assert text in errors, errors
    row["right message"] = 1
    return errors, row["slowest s"]


def test_a_reader_that_goes(start: Start, tmp_path: Path, tried: Tried) -> None:
    """With `launch … | head -1`, the rank that prints fails, and the run with it."""
    (tmp_path / "talks.py").write_text(TALKS)
    mark = uuid.uuid4().hex
    launcher = start("--cpu", "--num_processes", "2", "talks.py", mark)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "line 0\n"
    launcher.stdout.close()
    launcher.stdout = Path(os.devnull).open()  # noqa: SIM115 - for `communicate`
    row = tried("the reader of the output goes", 1)
    expect(launcher, row, Workers(mark), 1, "BrokenPipeError", "rank 0 failed first, with exit code 1")


def test_a_port_that_is_taken(start: Start, tmp_path: Path, tried: Tried) -> None:
    """A port in use is reported before any process starts."""
    (tmp_path / "talks.py").write_text(TALKS)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        launcher = start("--cpu", "--num_processes", "2", "--main_process_port", port, "talks.py")
        row = tried("a port that is taken", 1)
        expect(launcher, row, Workers(uuid.uuid4().hex), 2, f"--main_process_port: port {port} is taken")


def test_a_name_that_is_not_known(start: Start, tmp_path: Path, tried: Tried) -> None:
    """An unknown host name may still appear with its machine, so the rendezvous' time-out applies: 600 s by default."""
    (tmp_path / "talks.py").write_text(TALKS)
    several = ("--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "no-such-host.invalid")
    launcher = start("--cpu", "--num_processes", "2", *several, "--rdzv_conf", "timeout=2", "talks.py")
    row = tried("a name that is not known", 1)
    why = "machine 0 does not answer ("
    expect(launcher, row, Workers(uuid.uuid4().hex), 1, why, "Nothing was started here", "no-such-host.invalid:29500")


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """Create a control group of 1.5 GB, if permitted. Its file `procs` adds a process."""
    root, limit = (MEMORY, "memory.limit_in_bytes") if MEMORY.is_dir() else (UNIFIED, "memory.max")
    group = root / f"zero_plugin_{uuid.uuid4().hex}"
    try:
        group.mkdir()
        (group / limit).write_text("1500000000")
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    yield group
    group.rmdir()


@pytest.mark.campaign
def test_memory_of_a_control_group(start_program: Start, tmp_path: Path, tried: Tried, memory_group: Path) -> None:
    """The kernel kills the process that uses too much. The message names its rank and the lack of memory."""
    (tmp_path / "eats.py").write_text(EATS)
    mark = uuid.uuid4().hex
    join = f"echo $$ > {memory_group / 'cgroup.procs'}; exec "
    launch = f"{sys.executable} -m zero_plugin launch --cpu --num_processes 2 eats.py {mark}"
    launcher = start_program(["sh", "-c", join + launch], cwd=tmp_path)
    row = tried("the kernel kills a rank for memory", 1)
    said = ("rank 1 was ended by signal 9 (SIGKILL)", "The kernel did it, because CPU memory ran out (1.4 GiB here")
    expect(launcher, row, Workers(mark), 137, *said)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a separate disk of 600 MB, if permitted."""
    image, place = tmp_path / "image", tmp_path / "disk"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(600 << 20)
    for command in (("mkfs.ext4", "-q", image), ("mount", "-o", "loop", image, place)):
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:  # noqa: PERF203 - two commands
            pytest.skip(f"no disk can be mounted: {error}")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


GONE = "offload to NVMe: DeepSpeed could not write or read its files"
ENDS = {
    ("gone", 1): (1, GONE, "No such file or directory"),
    ("full", 0): (134, "disk that it offloads to is full"),
    ("full", 2): (0,),
}


@pytest.mark.campaign
@pytest.mark.parametrize(("fault", "step"), list(ENDS))
def test_the_disk_of_an_offload(fault: str, step: int, start: Start, disk: Path, tried: Tried, built_ops: None) -> None:
    """A disk removed midway, or full before the first gradients, ends the run. Full later, it is harmless."""
    folder, mark = disk / "nvme", uuid.uuid4().hex
    folder.mkdir()
    launcher = start("--num_processes", "2", str(OFFLOADS), str(folder), fault, str(step), mark, OMP_NUM_THREADS="1")
    row = tried(f"the disk of an offload is {fault}", 1)
    code, *words = ENDS[fault, step]
    expect(launcher, row, Workers(mark), code, *words)
