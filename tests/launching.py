"""Programs and processes that tests start: the one harness that starts them, waits, reads their output and ends them.

* `start_program`, `start` and `launch` start programs with pipes, `run_launcher` runs one to its end. No program
  outlives its test.
* `run_processes` runs a script as the processes of a group, `ProcessGroup` is for tests that kill some of them, and
  `wait_for_ends` waits for any processes.
* `run_python` runs a Python program that only has to run, as a fork, and `run_afresh` any, as a new Python.
* `forked_workers` and `forked_alone` are variables with which a program runs as a fork: see forked.py.
* `Workers` are the worker processes of a launch, found by a mark on their command lines.

conftest.py has the fixtures for all tests.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from forked import ALONE, FORKS, SERVER, Fork, forks_of

from zero_plugin.config.document import ENVIRONMENT_VARIABLE
from zero_plugin.machine.hardware import port_is_free

PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
BOUND_S = 120  # of a disturbed run, from the fault on; the group's time-out and the time to stop are seconds
needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc")


# ---- waiting ---------------------------------------------------------------------------------------------------------


class StandStill:
    """A limit for idle processes that a busy machine, six times slower, does not reach.

    Args:
        seconds: the time in which they and their children must use one second of CPU time, or end.
    """

    def __init__(self, *pids: int, seconds: float) -> None:
        self._pids, self._seconds = pids, seconds
        self._used, self._since = 0.0, time.monotonic()

    def __bool__(self) -> bool:
        used = 0.0
        waiting, seen = [*self._pids], set[int]()
        while waiting:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(waiting.pop())
                for one in (process, *process.children(recursive=True)):
                    if one.pid in seen:
                        continue
                    seen.add(one.pid)
                    waiting += forks_of(one.pid)
                    with contextlib.suppress(psutil.Error):
                        used += sum(one.cpu_times()[:4])
        if abs(used - self._used) >= 1:  # less, if one has ended that its parent has not waited for
            self._used, self._since = used, time.monotonic()
        return time.monotonic() - self._since > self._seconds


def wait_until(condition: Callable[[], object], *, seconds: float = 60) -> None:
    """Wait for a condition, and fail if it does not become true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not come in {seconds} s"
        time.sleep(0.02)


def wait_for_ends(
    processes: Sequence[Any], is_over: Callable[[Mapping[int, float]], object], *, every: float = 0.02
) -> dict[int, float]:
    """Wait until all have ended or `is_over`, then kill the others.

    Args:
        processes: results of `start_script` or `subprocess.Popen`.
        is_over: gets this function's result so far.
        every: seconds between two checks.

    Returns:
        The time at which each process ended without being killed, by its index.
    """
    ended: dict[int, float] = {}
    try:
        while len(ended) < len(processes) and not is_over(ended):
            time.sleep(every)
            for index, process in enumerate(processes):
                if index not in ended and process.poll() is not None:
                    ended[index] = time.monotonic()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return ended


def read_until(launcher: subprocess.Popen[str], start: str) -> list[str]:
    """Return the lines that a launcher prints, up to one with this beginning."""
    assert launcher.stdout is not None
    lines: list[str] = []
    while not lines or not lines[-1].startswith(start):
        lines.append(launcher.stdout.readline())
        assert lines[-1], launcher.communicate(timeout=60)[1]
    return lines


def ends_of(*launchers: subprocess.Popen[str], seconds: float = 200) -> list[tuple[int, str, str]]:
    """Return exit code, output and errors of each, within one time limit for all."""
    deadline = time.monotonic() + seconds
    done = []
    for launcher in launchers:
        output, errors = launcher.communicate(timeout=max(0.1, deadline - time.monotonic()))
        done.append((launcher.returncode, output, errors))
    return done


# ---- programs --------------------------------------------------------------------------------------------------------


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return the caller's environment without variables that change a launch.

    Home and temporary files are the test's own.
    """
    touched = {"OMP_NUM_THREADS", "DS_ACCELERATOR", ENVIRONMENT_VARIABLE}
    kept = {name: value for name, value in os.environ.items() if name not in touched}
    return {**kept, "HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}


def find_free_port() -> int:
    """Return a free port for a later run, outside the range from which systems assign ports."""
    draw = random.Random()  # simultaneous tests draw others
    while not port_is_free(port := draw.randrange(20_000, 32_000)):
        pass
    return port


@pytest.fixture
def free_port() -> Callable[[], int]:
    """Return a port as `find_free_port` does."""
    return find_free_port


@pytest.fixture
def start_program() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a program with pipes and the options of `Popen`. At the end it is killed, or with `gently` terminated."""
    started: list[tuple[subprocess.Popen[str], bool]] = []

    def start(command: Sequence[str | Path], *, gently: bool = False, **options: Any) -> subprocess.Popen[str]:
        program: subprocess.Popen[str] = subprocess.Popen(command, **{**PIPES, **options})
        started.append((program, gently))
        return program

    yield start
    for program, gently in started:
        program.terminate() if gently else program.kill()
        program.communicate()


@pytest.fixture
def start(
    tmp_path: Path, environment: dict[str, str], start_program: Callable[..., subprocess.Popen[str]]
) -> Callable[..., subprocess.Popen[str]]:
    """Start `zero-plugin launch …` in `tmp_path`."""

    def start(*arguments: str, **extra_environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "zero_plugin", "launch", *arguments]
        return start_program(command, cwd=tmp_path, env={**environment, **extra_environment})

    return start


@pytest.fixture
def launch(
    start: Callable[..., subprocess.Popen[str]], forked_workers: dict[str, str], forked_alone: dict[str, str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `zero-plugin launch …` in `tmp_path` to its end. Launcher and workers are forks, unless started `afresh`.

    With `workers_afresh` only the launcher is a fork.
    """

    def launch(
        *arguments: str, afresh: bool = False, workers_afresh: bool = False, **extra_environment: str
    ) -> subprocess.CompletedProcess[str]:
        forks = {} if afresh else forked_alone if workers_afresh else forked_workers
        launcher = start(*arguments, **forks, **extra_environment)
        return subprocess.CompletedProcess(launcher.args, *ends_of(launcher)[0])

    return launch


@pytest.fixture
def run_launcher() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a launcher (torchrun, `zero-plugin launch`) to its end. Stop it if all processes stand still.

    Killing it, as `subprocess.run` would, leaves the workers, which have their own sessions.
    """

    def run(command: Sequence[str | Path], *, seconds: float, **options: Any) -> subprocess.CompletedProcess[str]:
        with subprocess.Popen(command, **PIPES, **options) as launcher:
            stuck = StandStill(launcher.pid, seconds=seconds)
            while True:
                try:
                    output, errors = launcher.communicate(timeout=5)
                    break
                except subprocess.TimeoutExpired:
                    if not stuck:
                        continue
                launcher.terminate()
                output, errors = launcher.communicate(timeout=60)
                pytest.fail(f"stood still for {seconds} s:\n{output}\n{errors}")
        return subprocess.CompletedProcess(command, launcher.returncode, output, errors)

    return run


@pytest.fixture(scope="session")
def forked_workers() -> dict[str, str]:
    """Return a CPU launch's variables for forked workers, for tests about training.

    A test about a start, an end or a fault does without forks. So do launches with GPUs, and systems other than Linux.
    """
    import torch

    return {} if torch.cuda.is_available() or SERVER not in os.environ else {FORKS: os.environ[SERVER]}


@pytest.fixture(scope="session")
def forked_alone(forked_workers: dict[str, str]) -> dict[str, str]:
    """Return variables of a Python that is a fork, while its children are not.

    For a launcher whose workers' start or end is under test, and for a program that only has to run.
    """
    return dict.fromkeys([ALONE], forked_workers[FORKS]) if forked_workers else {}


def run_afresh(
    *arguments: object, cwd: Path | None = None, seconds: float = 200, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments to its end, with these variables added to the caller's."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=seconds,
    )


@pytest.fixture
def run_python(forked_alone: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python with these arguments to its end, as a fork with finished imports.

    For a program that only has to run. A test about a start, an import or an end takes `run_afresh`.
    """

    def run(*arguments: object, **given: Any) -> subprocess.CompletedProcess[str]:
        return run_afresh(*arguments, **{"OMP_NUM_THREADS": "1", **forked_alone, **given})

    return run


@pytest.fixture(scope="session")
def lines_of() -> Callable[[Iterable[str]], Iterator[str]]:
    """Return the lines that programs print, without torch 2.9's gloo messages about connections.

    gloo writes them in pieces, and another process's lines may come between these.
    """
    return lambda lines: (line for line in lines if "[Gloo]" not in line and " peer ranks" not in line and line.strip())


# ---- processes of a group --------------------------------------------------------------------------------------------


def start_script(
    script: str | Path, *arguments: object, log: Path, variables: Mapping[str, str] | None = None
) -> Fork | subprocess.Popen[bytes]:
    """Start a script as a fork with finished imports. Its output is appended to `log`.

    Its folder's helpers, and those of this folder, are imported by name.
    """
    command = [str(script), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}
    with log.open("ab") as output:
        if SERVER in os.environ:
            return Fork(os.environ[SERVER], command, environment, output.fileno())
        environment["PYTHONPATH"] = f"{Path(__file__).parent}{os.pathsep}{environment.get('PYTHONPATH', '')}"
        quiet = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        return subprocess.Popen([sys.executable, *command], env=environment, **quiet)


class ProcessGroup:
    """A script that runs as `world` processes, `script STORE RANK WORLD ARGS…`.

    STORE is a file at which `init_process_group(init_method="file://STORE")` meets: no port is taken.

    Attributes:
        processes: by rank.
    """

    def __init__(self, script: str | Path, world: int, *arguments: object, folder: Path) -> None:
        store = folder / f"store-{time.monotonic_ns()}"
        self._logs = [folder / f"{store.name}-{rank}.log" for rank in range(world)]
        self.processes: list[Any] = []
        try:
            for rank, log in enumerate(self._logs):
                self.processes.append(start_script(script, store, rank, world, *arguments, log=log))
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """Kill all processes."""
        for process in self.processes:
            process.kill()
            process.wait()

    def outputs(self) -> list[str]:
        """Return each process's output."""
        return [log.read_text() if log.exists() else "" for log in self._logs]


@pytest.fixture
def run_processes(tmp_path: Path) -> Callable[..., list[str]]:
    """Run a script as a `ProcessGroup` to its end. Return the processes' outputs, or raise the failing one's.

    No process outlives the call, which fails if all stand still for this number of seconds. The processes are forks
    with finished imports. For a test about a start or an end, Python itself is started.
    """

    def run(script: str | Path, world: int, *arguments: object, seconds: float = 180) -> list[str]:
        group = ProcessGroup(script, world, *arguments, folder=tmp_path)
        stuck, looked = StandStill(*(process.pid for process in group.processes), seconds=seconds), time.monotonic()

        def is_over(ended: Mapping[int, float]) -> bool:
            nonlocal looked
            if any(group.processes[rank].returncode for rank in ended):
                return True
            if time.monotonic() - looked < 5:
                return False
            looked = time.monotonic()
            return bool(stuck)

        ended = wait_for_ends(group.processes, is_over)
        codes = [process.returncode if rank in ended else None for rank, process in enumerate(group.processes)]
        outputs = group.outputs()
        assert codes == [0] * world, "\n".join(
            f"--- process {rank}: {'still running' if codes[rank] is None else codes[rank]}\n{output}"
            for rank, output in enumerate(outputs)
        )
        return outputs

    return run


# ---- workers of a launch ---------------------------------------------------------------------------------------------


def processes_with(mark: str) -> dict[int, Path]:
    """Return the processes with `mark` on their command line: process id, and its folder in /proc."""
    entries = (entry for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return {int(entry.name): entry for entry in entries if mark in _read(entry / "cmdline")}


@dataclass
class Workers:
    """The worker processes of a launch, found by a mark on their command lines."""

    mark: str

    def find(self) -> dict[int, tuple[int, dict[str, str]]]:
        """Return process id and environment by rank, without the launcher and ended processes."""
        found = {}
        for pid, entry in processes_with(self.mark).items():
            words = _read(entry / "environ").split("\0")
            environment = dict(word.partition("=")[::2] for word in words)
            if "RANK" in environment:
                found[int(environment["RANK"])] = pid, environment
        return found

    def wait_for(self, count: int, launcher: Any = None) -> dict[int, tuple[int, dict[str, str]]]:
        """Wait until all exist, or until `launcher` has ended. Return them."""
        deadline = time.monotonic() + BOUND_S
        while len(found := self.find()) < count and (launcher is None or launcher.poll() is None):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return found

    def finish(self, launcher: subprocess.Popen[str], ports: Iterable[int] = ()) -> str:
        """Wait for the end, within the bound. Check that no process and no port is left.

        Return the launcher's stderr.
        """
        _, errors = launcher.communicate(timeout=BOUND_S)
        assert self.find() == {}, errors
        assert [port for port in ports if not port_is_free(port)] == []
        return errors


def _read(file: Path) -> str:
    """Read a file of a process, or return "" if the process has ended."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
