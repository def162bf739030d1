"""What the tests of this folder share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SERVER = Path(__file__).parent / "fork_server.py"
PHASES = ("none", "write", "fsync", "rename", "rotate")  # as the server's


@dataclass(frozen=True)
class Outcome:
    """What became of a job's processes.

    Attributes:
        codes: exit codes; None where the time was over.
        board: a row of numbers for each process, see the server.
        logs: what they printed.
    """

    codes: list[int | None]
    board: list[list[int]]
    logs: str

    def phase(self, rank: int) -> str:
        """In which phase a process has ended."""
        return PHASES[self.board[rank][0]]

    def told(self, rank: int, index: int) -> int:
        """A number that the job has written."""
        return self.board[rank][8 + index]


class Forks:
    """Runs jobs in processes that are forked from one which has imported everything."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._jobs = 0
        command = [sys.executable, str(SERVER)]
        self._log = (folder / "server.log").open("w")
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )

    def run(
        self, job: str, world: int, *, kill: dict[str, Any] | None = None, seconds: float = 60, **arguments: Any
    ) -> Outcome:
        """Run a job to its end, or to that of its time."""
        request = {"job": job, "world": world, "folder": str(self._folder), "seconds": seconds, "kill": kill}
        request["test"] = os.environ["PYTEST_CURRENT_TEST"]
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps({**request, "arguments": arguments}), file=self._server.stdin, flush=True)
        line = self._server.stdout.readline()
        assert line, (self._folder / "server.log").read_text()
        logs = [self._folder / f"run-{self._jobs}-{rank}.log" for rank in range(world)]
        self._jobs += 1
        told = [f"--- process {rank}\n{log.read_text()}" for rank, log in enumerate(logs) if log.exists()]
        return Outcome(**json.loads(line), logs="\n".join(told))

    def end(self) -> None:
        """End the server."""
        self._server.kill()
        self._server.communicate()
        self._log.close()


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory, built_ops: None) -> Iterator[Forks]:
    """The server; what it has forked ends with it."""
    forks = Forks(tmp_path_factory.mktemp("forks"))
    yield forks
    forks.end()
