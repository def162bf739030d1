"""The tests that run each line, from coverage.py, and the tests that each mutant is tried on."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, zip_longest
from pathlib import Path

import coverage
import psutil
from mutations import PACKAGE, ROOMS, Mutant
from on_paths import ALL
from recording import FOLDER

ROOT = Path(__file__).parents[2]
# The quick tests of these rooms: for each run of pytest its tests, and its options, as in the Makefile.
_TOP = tuple(f"tests/{file.name}" for file in sorted(ROOT.glob("tests/test_*.py")))
_ROOMS = tuple(f"tests/{name}" for name in ("loop", "checkpoint", "data", "distributed", "kinds"))
_PATHS = ("strategies", "parity/test_parity.py", "several_models", "transformers")
_SHARED = ("--numprocesses", "2", "--dist", "loadgroup", "--no-loadscope-reorder")
RUNS = (
    (*_TOP, *_ROOMS, "tests/strategies", "tests/facade", "--numprocesses", "2", "-m", "not campaign and not processes"),
    (*(f"tests/{name}" for name in _PATHS), *_SHARED, "-m", "processes"),  # of all paths, the campaign's included
    (*_TOP, *_ROOMS, *_SHARED, "-m", "not campaign and processes"),
)
_CONFIG = """
[run]
core = ctrace
branch = False
parallel = True
relative_files = True
patch = subprocess, fork, _exit
data_file = {folder}/data
include = {files}
disable_warnings = no-data-collected, couldnt-parse, dynamic-conflict
"""
_NAMES = "|".join(sorted((*ALL, "zero3-nvme", "zero3-cpu-optimizer"), key=len, reverse=True))
_PATH = re.compile(rf"[-@\[]({_NAMES})[-\]@]")


@dataclass(frozen=True)
class Test:
    """A test that passes on the unchanged package.

    Attributes:
        node: its id.
        daily: whether it runs in `make test`.
        processes: whether it starts processes.
        lines: number of lines it runs.
    """

    __test__ = False

    node: str
    daily: bool
    processes: bool
    lines: int

    @property
    def path(self) -> str:
        """The training path that its name begins with, or ""."""
        found = _PATH.search(self.node)
        return found[1] if found else ""


class Lines:
    """The tests of each line.

    Args:
        tests: all tests.
        of_file: file in the package → line → indices of tests.
    """

    def __init__(self, tests: Sequence[Test], of_file: Mapping[str, Mapping[int, Sequence[int]]]) -> None:
        self._tests, self._of_file = tests, of_file

    def tests_of(self, mutant: Mutant) -> list[Test]:
        """Return the tests of the mutant's code, alternating over paths: one that runs few lines, then a random one.

        The tests with the fewest lines are the most specific, but may all be of one kind.
        """
        lines = self._of_file.get(mutant.file, {})
        for place in mutant.places:
            found = {index for line in place for index in lines.get(line, ())}
            if found:
                return _in_turn(self._tests[index] for index in found)
        return []

    def save(self, file: Path) -> None:
        """Write the lines as JSON."""
        file.write_text(json.dumps({"tests": [asdict(test) for test in self._tests], "lines": self._of_file}))

    @classmethod
    def load(cls, file: Path) -> Lines:
        """Load a file of `save`."""
        saved = json.loads(file.read_text())
        of_file = {name: {int(line): tests for line, tests in of.items()} for name, of in saved["lines"].items()}
        return cls([Test(**test) for test in saved["tests"]], of_file)


def _in_turn(tests: Iterable[Test]) -> list[Test]:
    by_path: dict[str, list[Test]] = {}
    for test in sorted(tests, key=lambda test: (test.lines, test.node)):
        by_path.setdefault(test.path, []).append(test)
    mixed = []
    for few_first in by_path.values():
        by_chance = random.Random(0).sample(few_first, len(few_first))
        mixed.append(dict.fromkeys(chain.from_iterable(zip(few_first, by_chance, strict=True))))
    return [test for turn in zip_longest(*mixed) for test in turn if test is not None]


def copy_of(root: Path, place: Path) -> Path:
    """Copy the checkout with its compiled files, whose size and time Python checks, so both are copied."""
    leave_out = shutil.ignore_patterns(".*", "results", "build", "dist", "*.egg-info")
    return Path(shutil.copytree(root, place, ignore=leave_out))


def environment_for(copy: Path, **variables: str) -> dict[str, str]:
    """Return the environment for tests of a copy. Its package has priority over an installed one."""
    path = f"{copy}{os.pathsep}{copy / 'tests/mutants'}"
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}


def record(folder: Path, runs: Iterable[Sequence[str]] = RUNS) -> Lines:
    """Run the tests on a copy and record the tests that run each line of `ROOMS`.

    Args:
        folder: a new folder.
        runs: arguments of pytest, for each of its runs.
    """
    folder.mkdir(parents=True)
    copy = copy_of(ROOT, folder / "copy")
    config = folder / "coverage.cfg"
    files = ", ".join(f"{copy}/{PACKAGE}/{room}/*" for room in ROOMS)
    config.write_text(_CONFIG.format(folder=folder, files=files))
    command = [sys.executable, "-m", "coverage", "run", f"--rcfile={config}", "-m", "pytest", "-q", "-p", "recording"]
    for arguments in runs:
        run = subprocess.Popen(
            [*command, "-p", "no:cacheprovider", f"--basetemp={folder / 'temporary'}", *arguments],
            cwd=copy,
            env=environment_for(copy, **{FOLDER: str(folder)}),
            start_new_session=True,
        )
        run.wait()  # whatever its result: a test that fails in a copy, or while it is traced, is left out
        while run.pid in map(_session_of, psutil.pids()):  # a process that forks others writes its lines after that
            time.sleep(0.1)
    lines = _read(folder, copy, config)
    shutil.rmtree(folder)
    return lines


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def _read(folder: Path, copy: Path, config: Path) -> Lines:
    ran = [test for file in folder.glob("tests-*.json") for test in json.loads(file.read_text())]
    assert ran, "no test was recorded"
    number: dict[str, int] = {}
    for index, test in enumerate(ran):
        if test["passed"]:
            number.update({f"{test['item']} ({when})": index for when in ("setup", "call", "teardown")})
            number.update(dict.fromkeys((test["item"], test["context"]), index))
    here = coverage.Coverage(config_file=str(config))
    here.combine([str(folder)])
    data = here.get_data()
    of_file: dict[str, dict[int, list[int]]] = {}
    counts = [0] * len(ran)
    for name in data.measured_files():
        lines = {
            line: sorted({number[context] for context in contexts if context in number})
            for line, contexts in data.contexts_by_lineno(name).items()
        }
        file = name.split(f"{PACKAGE}/", 1)[1]
        of_file[file] = {line: tests for line, tests in lines.items() if tests}
        for index in chain(*lines.values()):
            counts[index] += 1
    tests = [
        Test(test["node"], test["daily"], test["processes"], count) for test, count in zip(ran, counts, strict=True)
    ]
    failed = sorted(test["node"] for test in ran if not test["passed"])
    print(f"{len(ran)} tests, of which these have not passed and are left out:", *failed, sep="\n  ")
    return Lines(tests, of_file)
