"""The package's text and the docs keep the rules of plain English that a program can check."""

from __future__ import annotations

from pathlib import Path

import pytest
from prose import files_below, find_in


@pytest.mark.parametrize("text", ["Beside the step nobody waits.", "Open it anew, so that it works; else it fails."])
def test_a_word_of_the_list_is_found(text: str, tmp_path: Path) -> None:
    """A listed word is found in prose, and not in code."""
    page = tmp_path / "page.md"
    page.write_text(text)
    assert list(find_in(page))
    page.write_text("`beside`\n\n```\nanew, so that\n```\n")
    assert not list(find_in(page))


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        ('def f():\n    """What it returns."""\n', "begin with a verb"),
        ('@property\ndef f(self):\n    """Which one it is."""\n', "begin with a verb or a noun"),
        ('@property\ndef f(self):\n    """The one that is used."""\n', ""),
        (f'def f():\n    """Return {"very " * 40}much."""\n', "sentence of 42 words"),
        (f'def f():\n    """Return {"very much, and so. " * 25}"""\n', "paragraph of 101 words"),
        ('raise ValueError("it is built anew for nobody here")\n', "anew"),
        ("x = 1  # so that it is one\n", "so that"),
    ],
)
def test_a_rule_holds_where_it_is_meant(code: str, rule: str, tmp_path: Path) -> None:
    """Rules apply to docstrings, messages and comments, each where it is meant."""
    file = tmp_path / "module.py"
    file.write_text(code)
    assert [one.rule for one in find_in(file) if rule and rule in one.rule] or not (rule or list(find_in(file)))


ROOT = Path(__file__).parents[2]
CHECKED = ("zero_plugin", "benchmarks", "examples", "docs", "README.md", "CHANGELOG.md", "CONTRIBUTING.md")


@pytest.mark.parametrize("place", CHECKED)
def test_the_rules_hold(place: str) -> None:
    """A passage that breaks one is listed with its file and line."""
    found = [one for file in files_below(ROOT / place) for one in find_in(file)]
    assert found == [], "\n".join(f"{one.file}:{one.line}: {one.rule}: {one.passage}" for one in found)
