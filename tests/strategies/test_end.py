"""Ends of runs: exit code 0, immediately after an error, and without a file left on the NVMe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

JOB = Path(__file__).parent / "job.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]

pytestmark = [pytest.mark.programs, pytest.mark.processes, pytest.mark.usefixtures("built_ops")]

Torchrun = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def torchrun(run_launcher: Callable[..., subprocess.CompletedProcess[str]], forked_alone: dict[str, str]) -> Torchrun:
    """Run `torchrun job.py …` with two processes to its end."""
    return lambda *arguments: run_launcher(
        [*TORCHRUN, JOB, *arguments], seconds=200, env={**ENVIRONMENT, **forked_alone}
    )


def assert_clean(torchrun: Torchrun, path: str, how: str, nvme: Path) -> None:
    run = torchrun(path, how, *([nvme] if path == "nvme" else []))
    assert run.returncode == 0, run.stderr
    assert "Traceback" not in run.stderr
    assert "destroy_process_group" not in run.stderr, "torch warned of a process group that was left"
    assert list(nvme.iterdir()) == []


def test_a_run_ends_with_0(torchrun: Torchrun, tmp_path: Path) -> None:
    """Without end_training(), with all objects still referenced, the exit code is 0 and no NVMe file is left."""
    assert_clean(torchrun, "nvme", "keep", tmp_path)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", ["ddp", "zero2", "zero3", "nvme"])
@pytest.mark.parametrize("how", ["end", "fall", "exit", "keep"])
def test_runs_always_end_with_0(torchrun: Torchrun, path: str, how: str, tmp_path: Path) -> None:
    """Over all paths and endings, 64 runs: a gloo process that still holds its group aborts once in three times."""
    for _ in range(4):
        assert_clean(torchrun, path, how, tmp_path)


TELLS_OF_ITS_END = """
import weakref

import torch
import torch.distributed as dist
from torch import nn

from zero_plugin import Accelerator

def tell(what, is_initialized=dist.is_initialized):
    print(what, "gone, group", "there" if is_initialized() else "gone", flush=True)

dist.destroy_process_group = lambda destroy=dist.destroy_process_group, tell=tell: (destroy(), tell("all"))
accelerator = Accelerator(cpu=True)
model = nn.Linear(2, 2)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
model.itself = [model]
weakref.finalize(model, tell, "model").atexit = False
accelerator.backward(model(torch.ones(1, 2)).sum())
optimizer.step()
del model, optimizer, accelerator
"""


def test_the_group_ends_after_all_that_holds_it(
    run_launcher: Callable[..., subprocess.CompletedProcess[str]], forked_alone: dict[str, str], tmp_path: Path
) -> None:
    """A gloo group that is still referenced sometimes aborts its process at exit.

    DDP is freed first, cycles included.
    """
    (tmp_path / "script.py").write_text(TELLS_OF_ITS_END)
    environment = {**ENVIRONMENT, **forked_alone}
    run = run_launcher([*TORCHRUN, "--tee", "3", tmp_path / "script.py"], seconds=200, env=environment)
    assert run.returncode == 0, run.stderr
    for rank in (0, 1):
        said = [line.partition(":")[2] for line in run.stdout.splitlines() if line.startswith(f"[default{rank}]:")]
        assert [line for line in said if "gone" in line] == ["model gone, group there", "all gone, group gone"], (
            run.stdout
        )


@pytest.mark.parametrize("path", ["ddp", pytest.param("nvme", marks=pytest.mark.campaign)])
def test_an_error_on_one_process_ends_both(torchrun: Torchrun, path: str, tmp_path: Path) -> None:
    """The other process waits in a collective. The run ends, shows that error and leaves no file."""
    run = torchrun(path, "raise", *([tmp_path] if path == "nvme" else []))
    assert run.returncode != 0
    assert run.stderr.count("RuntimeError: the script's own error") == 1
    assert list(tmp_path.iterdir()) == []


FAILS_AT_ITS_END = """
import os, sys

import torch
import torch.distributed as dist
from torch import nn

from zero_plugin import Accelerator
from zero_plugin.trackers.trackers import GeneralTracker

def fail(*_, **__):
    raise ConnectionError("at the end")

class Tracker(GeneralTracker):
    name, requires_logging_directory, tracker = "failing", False, None
    store_init_configuration = log = lambda *_, **__: None
    if "tracker" in sys.argv:
        finish = fail

accelerator = Accelerator(cpu=True, log_with=Tracker())
accelerator.init_trackers("run")
model = nn.Linear(2, 2)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(1, 2)).sum())
optimizer.step()
if "group" in sys.argv:
    dist.destroy_process_group = fail
if "session" in sys.argv:
    accelerator._prepared.trainings[0].session.close = fail
if "exit" in sys.argv:
    accelerator._prepared.trainings[0].session.close = lambda: sys.exit(0)
print("trained")
"""


@pytest.mark.parametrize(
    ("start", "what"),
    [
        ("python", "session"),
        *(pytest.param("python", what, marks=pytest.mark.campaign) for what in ("tracker", "group", "exit")),
        ("torchrun", "group"),
        ("launch", "tracker"),
    ],
)
def test_an_exception_at_the_end_is_a_failure(
    start: str,
    what: str,
    run_launcher: Callable[..., subprocess.CompletedProcess[str]],
    forked_alone: dict[str, str],
    tmp_path: Path,
) -> None:
    """Any exception counts, at the exit of a script that did not call end_training(). Python alone would exit with 0.

    A tracker fails on process 0 only. The other process ends normally.
    """
    (tmp_path / "script.py").write_text(FAILS_AT_ITS_END)
    launch = [sys.executable, "-m", "zero_plugin", "launch", "--cpu", "--num_processes", "2", "--tee", "3"]
    command = {"python": [sys.executable], "torchrun": TORCHRUN, "launch": launch}[start]
    environment = {**ENVIRONMENT, **({} if start == "python" else forked_alone)}
    run = run_launcher([*command, tmp_path / "script.py", what], seconds=200, env=environment)
    assert run.returncode == 1, run.stderr
    assert "ConnectionError: at the end" in run.stderr or what == "exit"
    assert run.stdout.count("trained") == (1 if start == "python" else 2)
    if what == "tracker" and start == "launch":
        assert "rank 0 failed first" in run.stderr
        assert "[default1]:Traceback" not in run.stderr
        assert "[default1]:zero_plugin: error" not in run.stderr


@pytest.fixture
def start_job(start_program: Callable[..., subprocess.Popen[str]]) -> Callable[[Path], subprocess.Popen[str]]:
    """Start a job of one process that waits in the middle of its training."""

    def start(nvme: Path) -> subprocess.Popen[str]:
        job = start_program([sys.executable, JOB, "nvme", "wait", nvme], env=ENVIRONMENT, stdin=subprocess.PIPE)
        assert job.stdout is not None
        assert any(line == "training\n" for line in job.stdout), job.communicate()[1]
        return job

    return start


def runs_in(nvme: Path) -> set[str]:
    """Return the process ids of the runs that have a folder."""
    return {folder.name.split("-")[2] for folder in nvme.iterdir()}


@pytest.mark.campaign
def test_jobs_share_no_nvme_file(start_job: Callable[[Path], subprocess.Popen[str]], tmp_path: Path) -> None:
    """Jobs with one `nvme_path` have their own folders. The next job removes a killed job's folder."""
    (tmp_path / "the users own").mkdir()
    first = start_job(tmp_path / "swap")
    second = start_job(tmp_path / "swap")
    assert runs_in(tmp_path / "swap") == {str(first.pid), str(second.pid)}
    second.send_signal(signal.SIGKILL)
    second.wait()
    third = start_job(tmp_path / "swap")
    assert runs_in(tmp_path / "swap") == {str(first.pid), str(third.pid)}
    for job in (first, third):
        _, errors = job.communicate("go on\n", timeout=200)
        assert job.returncode == 0, errors
    assert list((tmp_path / "swap").iterdir()) == []
    assert (tmp_path / "the users own").is_dir()
