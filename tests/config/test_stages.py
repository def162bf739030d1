"""docs/config-stages.md names the stages in which a configuration becomes known."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import zero_plugin

PACKAGE = Path(zero_plugin.__file__).parent
PAGE = PACKAGE.parent / "docs" / "config-stages.md"


def test_there_are_at_most_five_stages_and_each_is_a_class() -> None:
    """A row of the table names a class and its file."""
    rows = re.findall(r"^\| (\d) \| `(\w+)` in `([\w/]+\.py)` \|", PAGE.read_text(), re.MULTILINE)
    assert [int(number) for number, *_ in rows] == list(range(1, len(rows) + 1))
    assert 1 < len(rows) <= 5
    for _, name, file in rows:
        tree = ast.parse((PACKAGE / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}, name


def test_the_page_names_what_exists() -> None:
    """The package defines the page's views and functions."""
    text = PAGE.read_text()
    named = {*re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE), *re.findall(r"\b\w+_\w+(?=[ ,]|$)", _drawing(text))}
    defined = set(re.findall(r"^ *(?:class|def) (\w+)", "\n".join(f.read_text() for f in PACKAGE.rglob("*.py")), re.M))
    assert named - defined == set()


def _drawing(text: str) -> str:
    return text.partition("```text")[2].partition("```")[0]
