"""Every mechanism of the loop contract has a test that fails when the mechanism is taken away."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from functools import cache
from pathlib import Path

import pytest
from rows import Row

ROOT = Path(__file__).parents[2]
# The tables are found by name: conftest.py has made them importable.
TABLES: dict[str, list[Row]] = {
    file.stem: importlib.import_module(file.stem).ROWS for file in sorted(Path(__file__).parent.glob("*_rows.py"))
}
ROWS = [row for rows in TABLES.values() for row in rows]
# Added to the changed file of a copy: each process that runs it leaves its id, and so does each fork of one.
NOTE = """
import os as _os, pathlib as _pathlib
def _leave_id():
    _pathlib.Path({folder!r}, str(_os.getpid())).touch()
_leave_id()
_os.register_at_fork(after_in_child=_leave_id)
"""

_PATH = r"(?:single|ddp|zero\d(?:-cpu)?)"
_CHECK = re.compile(rf"test_check\[(?P<module>\w+)-\d-{_PATH}-(?P<name>.+)\]")
_CASE = re.compile(rf"test_case_equals_plain_torch\[cpu-{_PATH}-(?P<name>.+)\]")


@cache
def text_of(file: str) -> str:
    """A file of the repository."""
    return (ROOT / file).read_text()


def describe_missing(node: str) -> str | None:
    """Which part of a node id is not there any more; None if all is. Nothing is imported, so it takes no time."""
    file, _, test = node.partition("::")
    if not (ROOT / file).exists():
        return file
    if f"\ndef {test.partition('[')[0]}(" not in text_of(file):
        return test
    if (case := _CASE.fullmatch(test)) and f'"{case["name"]}"' not in text_of("tests/parity/cases.py"):
        return f"the case {case['name']}"
    if check := _CHECK.fullmatch(test):
        checks = f"{Path(file).parent}/{check['module']}_checks.py"
        name = check["name"]
        if f"\ndef check_{name}(" not in text_of(checks) and f'"{name}"' not in text_of(checks):
            return f"the check {name} of {checks}"
    return None


@pytest.mark.parametrize("table", TABLES)
def test_the_rows_fit_the_code(table: str) -> None:
    """What a row takes away stands in its file once, what is left can be compiled, and its tests are there."""
    for row in TABLES[table]:
        text = text_of(f"zero_plugin/{row.file}")
        assert text.count(row.text) == 1, f"{row.name}: the text has moved; follow it"
        compile(text.replace(row.text, row.instead), row.file, "exec")
        missing = [part for node in row.tests if (part := describe_missing(node))]
        assert not missing, f"{row.name}: not there any more: {missing}"
        assert row.tests


def test_each_row_has_its_name() -> None:
    """By which it is run: test_a_mechanism_is_missed[NAME]."""
    names = [row.name for row in ROWS]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.campaign
@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("built_ops")
@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in ROWS])
def test_a_mechanism_is_missed(row: Row, tmp_path: Path) -> None:
    """The row's tests fail, each for the reason that it tells, in a copy of the package without the mechanism."""
    copy = copy_without(row, tmp_path)
    failures, pytest_id, output = run_tests(copy, row, tmp_path / "report.xml")
    ran = {int(file.name) for file in (tmp_path / "ran").iterdir()}
    others = ran - {pytest_id}
    assert len(others) >= row.processes, f"{len(others)} processes ran the changed {row.file}\n{output}"
    assert row.processes or pytest_id in ran, f"the changed {row.file} did not run\n{output}"
    survived = [node for node in row.tests if node not in failures]
    assert not survived, f"without it these pass: {survived}\n{output}"
    for node in row.tests:
        assert row.says in failures[node], f"{node} fails, but not since {row.says!r}:\n{failures[node]}"
    print("\n".join(line for node in row.tests for line in failures[node].splitlines() if row.says in line))


def copy_without(row: Row, folder: Path) -> Path:
    """A copy of the package and its tests, the row's mechanism taken away; who runs it leaves its id in FOLDER/ran."""
    copy = folder / "copy"
    for name in ("zero_plugin", "tests", "ds_configs"):  # and what is compiled: told by size and time, copied too
        shutil.copytree(ROOT / name, copy / name)
    shutil.copy(ROOT / "pyproject.toml", copy)
    (folder / "ran").mkdir()
    file = copy / "zero_plugin" / row.file
    text = file.read_text()
    assert text.count(row.text) == 1, f"the text has moved: it stands in {row.file} {text.count(row.text)} times"
    file.write_text(text.replace(row.text, row.instead) + NOTE.format(folder=str(folder / "ran")))
    return copy


def run_tests(copy: Path, row: Row, report: Path) -> tuple[dict[str, str], int, str]:
    """Run the row's tests on the copy, in a pytest of its own: what failed with its message, its id, its output."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *row.tests]
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=copy, env=environment, start_new_session=True, **pipes) as process:
        try:
            output, _ = process.communicate(timeout=row.seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # its fixtures end the processes that they have started
            output, _ = process.communicate(timeout=150)
            pytest.fail(f"still running after {row.seconds} s:\n{output}")
    assert process.returncode in (0, 1), f"the tests were not run:\n{output}"
    failures = {}
    for case in ET.parse(report).iter("testcase"):
        node = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        texts = [found.text or "" for kind in ("failure", "error") for found in case.iter(kind)]
        if texts:
            lines = "\n".join(texts).splitlines()
            failures[node] = "\n".join(line for line in lines if line.startswith("E "))
    return failures, process.pid, output
