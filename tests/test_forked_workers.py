"""Forked workers of launches act, and end, like real ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.programs, pytest.mark.processes]

SCRIPT = """
import json, os, sys, time

if sys.argv[1] == "show":
    names = ("RANK", "WORLD_SIZE", "DS_ACCELERATOR", "OMP_NUM_THREADS", "PYTHONPATH", "MINE", "ZERO_PLUGIN_TESTS_FORKS")
    shown = [sys.argv[1:], os.getcwd(), [os.environ.get(name) for name in names], sorted(os.sched_getaffinity(0))]
    shown += [sys.path[0], __file__, __name__, sys.stdin.read(), "deepspeed" in sys.modules]
    os.write(1, (json.dumps(shown) + "\\n").encode())
elif sys.argv[1] == "fail" and os.environ["RANK"] == "1":
    raise ValueError("the script's own error")
elif sys.argv[1] == "exit" and os.environ["RANK"] == "1":
    sys.exit(7)
else:
    os.write(1, f"{os.getpid()}\\n".encode())
    time.sleep(100)
"""

ALONE = """
import atexit, subprocess, sys

atexit.register(print, "at its end")
print(sys.argv, __name__, sys.stdin.read(), "deepspeed" in sys.modules, flush=True)
print("deepspeed" in sys.modules, file=sys.stderr)
subprocess.run([sys.executable, "-c", "import sys; print('of a child:', 'deepspeed' in sys.modules)"], check=True)

def fail():
    raise ValueError("its own")

fail() if sys.argv[1] == "fail" else sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """Return the beginning of a launch."""
    (tmp_path / "script.py").write_text(SCRIPT)
    return [sys.executable, "-m", "zero_plugin", "launch", "--cpu", "--num_processes", "2", "script.py"]


def test_what_they_are_started_with(command: list[str], tmp_path: Path, forked_workers: dict[str, str]) -> None:
    """They get arguments, folder, variables, cores and standard input. Only the imports are already done."""
    shown = []
    for variables in ({}, forked_workers):
        environment = {**os.environ, "MINE": "ü", **variables}
        done = subprocess.run(
            [*command, "show", "two words"], cwd=tmp_path, env=environment, input="in", capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        shown.append(sorted(json.loads(line) for line in done.stdout.splitlines()))
    for fresh, forked in zip(*shown, strict=True):
        assert fresh[:-1] == forked[:-1]
        assert (fresh[-1], forked[-1]) == (False, bool(forked_workers))


@pytest.mark.parametrize(("how", "code", "said"), [("fail", 1, "ValueError: the script's own error"), ("exit", 7, "")])
def test_how_they_fail(
    how: str, code: int, said: str, command: list[str], tmp_path: Path, forked_workers: dict[str, str]
) -> None:
    """The launcher gets the exit code and the rank, stops the other, and the traceback appears once."""
    environment = {**os.environ, **forked_workers}
    done = subprocess.run([*command, how], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == code, done.stderr
    assert f"rank 1 failed first, with exit code {code}" in done.stderr
    assert said in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_they_end_with_the_launcher(
    number: signal.Signals, command: list[str], tmp_path: Path, forked_workers: dict[str, str]
) -> None:
    """They end by a signal that it passes on, or because it is gone."""
    environment = {**os.environ, **forked_workers}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([*command, "wait"], cwd=tmp_path, env=environment, **pipes) as launcher:
        assert launcher.stdout is not None
        workers = [psutil.Process(int(launcher.stdout.readline())) for _ in range(2)]
        launcher.send_signal(number)
        assert launcher.wait(60) == (143 if number == signal.SIGTERM else -number)
        _, alive = psutil.wait_procs(workers, timeout=20)
        assert alive == []


@pytest.mark.parametrize("how", ["fail", "7", "0"])
def test_a_program_that_is_forked_alone(how: str, tmp_path: Path, forked_alone: dict[str, str]) -> None:
    """It prints and ends as under Python, including the traceback. Its children are no forks."""
    (tmp_path / "program.py").write_text(ALONE)
    ends = []
    for variables in ({}, forked_alone):
        program = [sys.executable, str(tmp_path / "program.py"), how]
        pipes = {"cwd": tmp_path, "env": {**os.environ, **variables}, "capture_output": True, "text": True}
        ends.append(subprocess.run(program, input="in", timeout=90, **pipes))
    assert ends[0].returncode == ends[1].returncode
    for fresh, forked in ((ends[0].stdout, ends[1].stdout), (ends[0].stderr, ends[1].stderr)):
        assert fresh.splitlines()[0].replace("False", str(bool(forked_alone))) == forked.splitlines()[0]
        assert fresh.splitlines()[1:] == forked.splitlines()[1:]
    assert "of a child: False" in ends[1].stdout
