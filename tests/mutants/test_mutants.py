"""The campaign's mutants: a reproducible sample of programs that behave differently, on tests that run them."""

from __future__ import annotations

import functools
import subprocess
import sys
from itertools import islice
from pathlib import Path

import campaign
import pytest
from campaign import run_tests, summarize, try_on
from lines import ROOT, Lines, Test, copy_of, record
from mutations import PACKAGE, Mutant, mutants_in, sample

WINDOW = "loop/window.py"
SAID = '''
"""Text 1 and 2."""
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    limit = 3


class Report:
    size: int | None

    def __repr__(self) -> str:
        return f"{self.size + 1}"

    def _describe(self, size: int | None, *, many: bool) -> str | None:
        return "several" if many else None

    def refuse(self, value):
        _log.info("%s", value + 1)
        raise ValueError(f"{value + 1}", value * 2)
'''


@functools.cache
def mutants_of_window() -> list[Mutant]:
    return list(mutants_in(WINDOW, (ROOT / PACKAGE / WINDOW).read_text()))


@pytest.mark.campaign
def test_the_sample_is_the_same_each_time() -> None:
    """A seed always gives the same sample. A larger sample extends a smaller one, and another seed differs."""
    mutants = mutants_of_window()
    drawn = sample(mutants, 40, seed=1)
    assert len({mutant.name for mutant in drawn}) == 40
    assert sample(mutants_of_window.__wrapped__(), 40, seed=1) == drawn  # found again
    assert sample(mutants, 10, seed=1) == drawn[:10]
    assert sample(mutants, 40, seed=2) != drawn


@pytest.mark.campaign
def test_each_mutant_is_another_program() -> None:
    """Each mutant compiles and differs from the package."""
    source = (ROOT / PACKAGE / WINDOW).read_text()
    plain = compile(source, WINDOW, "exec")
    for mutant in sample(mutants_of_window(), 25, seed=0):
        changed = mutant.mutate(source)
        assert compile(changed, WINDOW, "exec") != plain, mutant.name
        assert mutant.change(ROOT / PACKAGE), mutant.name


def test_what_is_only_said_or_typed_is_left_alone() -> None:
    """Docstrings, annotations, messages and log calls are no mutants. An error that is not raised is one."""
    found = list(mutants_in("said.py", SAID))
    assert [(mutant.operator, mutant.line) for mutant in found] == [("RemoveStatement", 20)]


def test_the_tests_of_a_mutant() -> None:
    """The tests of a mutant run its line: for each path in turn the test with the fewest lines, then others."""
    names = ("test_a", "check[1-ddp-one]", "check[2-ddp-two]", "check[2-zero2-one]")
    tests = [Test(name, True, False, lines) for name, lines in zip(names, (50, 9, 8, 30), strict=True)]
    lines = Lines(tests, {"a.py": {7: [0, 1, 2, 3], 9: [1]}})
    place = ((8,), (7,), (9,))  # no test runs line 8
    chosen = lines.tests_of(Mutant("a.py", "AddNot", 0, 8, 0, place))
    assert [test.node for test in chosen] == ["check[2-ddp-two]", "check[2-zero2-one]", "test_a", "check[1-ddp-one]"]
    assert lines.tests_of(Mutant("b.py", "AddNot", 0, 8, 0, place)) == []


def test_what_stands_still_or_runs_on_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant that hangs or loops endlessly is stopped and counts as caught."""
    monkeypatch.setattr(campaign, "_LOOK_SECONDS", 0.5)
    monkeypatch.setattr(campaign, "_STILL_SECONDS", 1)
    monkeypatch.setattr(campaign, "_ENDLESS_SECONDS", 0.7)
    for code, reason in (("import time; time.sleep(600)", "stands still"), ("while True: pass", "runs on and on")):
        process = subprocess.Popen([sys.executable, "-c", code])
        assert campaign._wait_for(process, tmp_path / "output", tmp_path) == reason
        assert process.poll() is not None


def test_the_summary_names_what_was_lost() -> None:
    """The summary names survivors and counts what daily tests and all tests catch."""
    names = ("window.py:1:0 AddNot", "window.py:2:0 AddNot", "window.py:3:0 AddNot", "window.py:4:0 AddNot")
    results = [
        {"mutant": name, "caught": caught, "tests": tests, "tried": tests, "change": "    -a\n    +b"}
        for name, caught, tests in zip(names, ("daily", "campaign", "lost", "lost"), (5, 5, 5, 0), strict=True)
    ]
    told = summarize(results)
    assert "No test catches window.py:3:0 AddNot  (5 of the 5 tests that run it were tried)\n    -a\n    +b" in told
    assert "No test catches window.py:4:0 AddNot  (no test runs it)" in told
    assert "The campaign's tests alone catch window.py:2:0" in told
    assert "4 mutants: 2 are caught by all tests, 1 by the daily ones; of the 2 others, 1 are on lines" in told


@pytest.mark.processes
@pytest.mark.usefixtures("built_ops")
@pytest.mark.campaign
def test_a_mutant_is_caught_by_a_test_that_runs_its_line(tmp_path: Path) -> None:
    """Lines are recorded in pytest's own process and in its child processes, each for its test."""
    check = "tests/strategies/test_loop.py::test_backward_never_steps[single]"
    lines = record(tmp_path / "recording", [("tests/loop/test_window.py", check, "-k", "FAILED-False or never_steps")])
    source = (ROOT / PACKAGE / WINDOW).read_text().splitlines()
    counts = next(mutant for mutant in mutants_of_window() if source[mutant.line - 1].strip() == "self.since_step += 1")
    assert check in [test.node for test in lines.tests_of(counts)]
    step = "loop/step.py"
    text = (ROOT / PACKAGE / step).read_text()
    fails, source = "raise window_errors.failed_gradients()", text.splitlines()
    refusal = next(mutant for mutant in mutants_in(step, text) if source[mutant.line - 1].strip() == fails)
    assert check not in [test.node for test in lines.tests_of(refusal)]

    folder = tmp_path / "mutant"
    folder.mkdir()
    result = try_on(refusal, lines, folder)
    assert (result["caught"], "FAILED-False" in result["by"]) == ("daily", True), result
    plain = copy_of(ROOT, tmp_path / "plain")
    assert not run_tests(plain, list(islice(lines.tests_of(refusal), 2)), folder).by
