"""Versions against the tested ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zero_plugin.cli.doctor_software import TESTED, check_packages, check_python

REQUIRED = ["torch>=2.9", "deepspeed<0.20,>=0.19.8", "rich>=13", 'peft>=0.21; extra == "transformers"']


def test_tested_versions_are_those_of_the_constraints() -> None:
    """What is called tested is what the suite is installed with."""
    pinned = (Path(__file__).parents[2] / "constraints.txt").read_text()
    for name, version in TESTED.items():
        assert re.search(rf"^{name}=={re.escape(version)}\b", pinned, re.MULTILINE), name


@pytest.mark.parametrize(
    ("version", "level"), [((3, 9), "wrong"), ((3, 10), "ok"), ((3, 13), "ok"), ((3, 15), "warning")], ids=str
)
def test_python(version: tuple[int, int], level: str) -> None:
    """Older than the least is wrong, newer than tested a warning; both name the command for another."""
    found = check_python(version)
    assert found.level == level
    assert ("-m venv" in found.fix) == (level != "ok")


@pytest.mark.parametrize(
    ("torch", "level"),
    [
        (TESTED["torch"], "ok"),
        (TESTED["torch"] + "+cu128", "ok"),
        ("2.9.1", "ok"),
        ("2.99.0", "warning"),
        ("2.8.0", "wrong"),
        (None, "wrong"),
    ],
)
def test_torch(torch: str | None, level: str) -> None:
    """Below the requirement or missing is wrong, newer than tested a warning; the fix installs the tested one."""
    (found,) = [f for f in check_packages({**TESTED, "torch": torch}, REQUIRED, deepspeed=True) if f.check == "torch"]
    assert found.level == level
    assert (f"pip install 'torch=={TESTED['torch']}'" in found.fix) == (level != "ok")


@pytest.mark.parametrize(("version", "needed", "level"), [(None, True, "wrong"), (None, False, "warning")])
@pytest.mark.parametrize("other", [None, "0.18.0", "0.20.0"])
def test_deepspeed_counts_where_the_config_needs_it(version: None, needed: bool, level: str, other: str | None) -> None:
    """Without ZeRO a missing or unfit DeepSpeed stops nothing."""
    found = {f.check: f for f in check_packages({**TESTED, "deepspeed": other}, REQUIRED, deepspeed=needed)}
    assert found["deepspeed"].level == level
