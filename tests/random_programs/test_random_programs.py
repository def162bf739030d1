"""Random training programs on every path, against plain torch on the global batch in one process.

`make campaign` prints the table (dimension | value | programs | right | refused | wrong) and every refusal.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the modules import each other by name, here and in the workers

from grammar import PATHS
from runner import execute, findings, spread, tables

DAILY = (1, 6, 7, 9, 14, 20, 21, 22, 26)
PROGRAMS, EACH = 180, 3


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("built_ops")
def test_some_programs_train_as_in_plain_torch(tmp_path: Path) -> None:
    """Nine programs on one path each have plain torch's losses, norms, rates and weights, or a documented refusal."""
    outcomes = spread(DAILY, 1)
    assert {outcome.path for outcome in outcomes} == set(PATHS)
    execute(outcomes, tmp_path)
    assert not (found := findings(outcomes)), "\n".join(found)


@pytest.mark.campaign
@pytest.mark.processes
@pytest.mark.timeout(5400)
@pytest.mark.usefixtures("built_ops")
def test_random_programs_train_as_in_plain_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """540 programs agree with plain torch, sixty per path. 135 of them run in processes that end like a script."""
    outcomes = spread(range(PROGRAMS), EACH)
    execute(outcomes, tmp_path)
    with capsys.disabled():
        print(f"\n{tables(outcomes)}")
    assert all(sum(outcome.path == path for outcome in outcomes) >= 40 for path in PATHS)
    assert sum(outcome.alone for outcome in outcomes) >= 100
    assert not (found := findings(outcomes)), "\n".join(found)
