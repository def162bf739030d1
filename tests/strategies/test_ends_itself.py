"""Things that a script ends before the package does: exit code 0, or an error that names what is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600), pytest.mark.usefixtures("built_ops")]

SCRIPT = Path(__file__).parent / "ends_itself.py"
Run = Callable[[str, str], list[str]]
PATHS = ("ddp", "zero0", "zero1", "zero2", "zero3", "zero3-gathered", "zero3-cpu", "nvme")
DAILY = {("group", "zero2"), ("group", "zero3"), ("group", "nvme")}
# The script's variants, each with the path on which it is tried daily.
WELL = {
    "group": "zero1",
    "group, all dropped": "zero3",
    "group, end_training": "zero2",
    "engine, group": "zero3-gathered",
    "save, group": "zero2",
    "logging": "ddp",
    "tracker": "ddp",
    "folder": "zero2",
    "nested exit": "zero2",
    "thread": "zero2",
}


@pytest.fixture
def run(run_processes: Callable[..., list[str]], tmp_path: Path) -> Run:
    """Run the script as two processes and return their output. Raise AssertionError with the output if one failed."""
    return lambda path, how: run_processes(SCRIPT, 2, path, how, tmp_path / "project")


def ways() -> Iterator[object]:
    for how, daily in WELL.items():
        for path in PATHS:
            if how == "engine, group" and path == "ddp":
                continue
            marks = () if path == daily or (how, path) in DAILY else pytest.mark.campaign
            yield pytest.param(path, how, marks=marks, id=f"{how}-{path}")


@pytest.mark.parametrize(("path", "how"), list(ways()))
def test_a_complete_run_ends_with_0(path: str, how: str, run: Run, tmp_path: Path) -> None:
    """No error or traceback is shown, a background save is complete, and no file is left on the NVMe."""
    outputs = run(path, how)
    for output in outputs:
        assert "trained" in output
        assert "Traceback" not in output
        assert "error" not in output
    if how == "save, group":
        assert (tmp_path / "project" / "checkpoints" / "checkpoint_0" / "manifest.json").exists()
    if path == "nvme" and how != "folder":
        assert list((tmp_path / "project" / "nvme").iterdir()) == []


@pytest.mark.parametrize("path", ["zero3", pytest.param("zero2", marks=pytest.mark.campaign)])
def test_one_process_ends_with_0(path: str, run_processes: Callable[..., list[str]], tmp_path: Path) -> None:
    """ZeRO on one process has a process group too."""
    assert "Traceback" not in run_processes(SCRIPT, 1, path, "group", tmp_path)[0]


@pytest.mark.parametrize(
    ("path", "how", "said"),
    [
        ("zero2", "failing save, group", "checkpoint_1 in the background"),
        ("ddp", "group, save", "LoopError: save_state() needs the other processes, but this script, by torch"),
        (
            "zero2",
            "group, weights",
            "LoopError: DeepSpeed needs the process group to read weights, but the group",
        ),
        ("ddp", "end_training, gather", "LoopError: gather() needs the other processes, but end_training() has ended"),
        ("ddp", "group of one", "after torch.distributed.destroy_process_group() and the end of its script"),
        pytest.param("zero3", "group of one", "process 1 is in end_training()", marks=pytest.mark.campaign),
    ],
)
def test_what_is_lost_is_named(path: str, how: str, said: str, run: Run) -> None:
    """The error names a failed save, a call that needs the group, values of one process, or others' training."""
    with pytest.raises(AssertionError, match="trained") as failed:
        run(path, how)
    assert said in str(failed.value)


def test_weights_of_ddp_are_saved_without_a_group(run: Run, tmp_path: Path) -> None:
    """Every process has all of them."""
    run("ddp", "group, weights")
    assert (tmp_path / "project" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("launcher", "path", "how"),
    [
        ("launch", "zero3", "group"),
        ("launch", "ddp", "busy thread"),  # the launcher's workers do not finalize the interpreter
        pytest.param("torchrun", "zero3", "group", marks=[pytest.mark.programs, pytest.mark.campaign]),
    ],
)
def test_with_a_launcher(
    launcher: str,
    path: str,
    how: str,
    run_launcher: Callable[..., subprocess.CompletedProcess[str]],
    forked_workers: dict[str, str],
    forked_alone: dict[str, str],
    tmp_path: Path,
) -> None:
    """The launcher's report has no failure."""
    start = {
        "launch": ["zero_plugin", "launch", "--cpu", "--num_processes", "2", "--prefer", "code"],
        "torchrun": ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
    }[launcher]
    command = [sys.executable, "-m", *start, SCRIPT, "-", "", "", path, how, tmp_path / "project"]
    environment = forked_workers if launcher == "launch" else forked_alone
    ended = run_launcher(command, seconds=200, env={**os.environ, "OMP_NUM_THREADS": "1", **environment})
    assert (ended.returncode, ended.stdout.count("trained")) == (0, 2), ended.stderr
    assert "Traceback" not in ended.stderr
