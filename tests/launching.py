"""A launcher as a user runs it, as fixtures: a process of its own, in an empty folder and an empty home."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from zero_plugin.config.document import ENVIRONMENT_VARIABLE


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The caller's environment without anything that changes a launch; home and temporary files are the test's own."""
    touched = {"OMP_NUM_THREADS", "DS_ACCELERATOR", ENVIRONMENT_VARIABLE}
    kept = {name: value for name, value in os.environ.items() if name not in touched}
    return {**kept, "HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}


@pytest.fixture
def free_port() -> Callable[[], int]:
    """Finds a port that nobody has, for a run to take later: one that no system gives away by itself meanwhile."""

    def free_port() -> int:
        draw = random.Random()  # tests that run at the same time draw others
        while True:
            port = draw.randrange(20_000, 32_000)
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) != 0:
                    return port

    return free_port


@pytest.fixture
def start(tmp_path: Path, environment: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `zero-plugin launch …` in `tmp_path`; no launcher outlives the test."""
    launchers: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **extra_environment: str) -> subprocess.Popen[str]:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "zero_plugin", "launch", *arguments],
            cwd=tmp_path,
            env={**environment, **extra_environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        launchers.append(launcher)
        return launcher

    yield start
    for launcher in launchers:
        launcher.kill()
        launcher.communicate()


@pytest.fixture
def launch(
    start: Callable[..., subprocess.Popen[str]], forked_workers: dict[str, str], forked_alone: dict[str, str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `zero-plugin launch …` in `tmp_path` to its end; launcher and workers are forks, unless started `afresh`.

    With `workers_afresh` the launcher alone is one.
    """

    def launch(
        *arguments: str, afresh: bool = False, workers_afresh: bool = False, **extra_environment: str
    ) -> subprocess.CompletedProcess[str]:
        forks = {} if afresh else forked_alone if workers_afresh else forked_workers
        launcher = start(*arguments, **forks, **extra_environment)
        output, errors = launcher.communicate(timeout=200)
        return subprocess.CompletedProcess(launcher.args, launcher.returncode, output, errors)

    return launch
