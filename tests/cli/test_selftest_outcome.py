"""What workers write down, and what the command makes of it."""

from __future__ import annotations

from pathlib import Path

from zero_plugin.cli.selftest import STEPS, Outcome, note, read_outcomes


def test_the_last_word_on_each_check_counts(tmp_path: Path) -> None:
    """What was begun and not ended stays begun, and has a way out; what is well has none."""
    file = tmp_path / "outcomes"
    assert read_outcomes(file) == []
    ended = Outcome("barrier", "ok", "2 processes", 0.5)
    for outcome in (Outcome("barrier", "begun"), ended, Outcome("all_reduce", "begun")):
        note(outcome, file)
    assert read_outcomes(file) == [ended, Outcome("all_reduce", "begun")]
    assert [outcome.fix for outcome in read_outcomes(file)] == ["", STEPS["all_reduce"]]


def test_every_check_has_a_way_out() -> None:
    """Never an empty one."""
    assert all(Outcome(check, "wrong").fix for check in STEPS)
    assert not any(Outcome(check, "left out").fix for check in STEPS)
