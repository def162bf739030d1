"""The README is true: its configs pass the check, its quotations are the script's, its file tree is the package's."""

import ast
import re
from pathlib import Path

import pytest

from zero_plugin.config.check import check_document
from zero_plugin.config.read import read_document

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("language", ["yaml", "json"])
def test_configs_pass_the_check(language: str, tmp_path: Path) -> None:
    """Every config that the README shows is accepted as it is printed."""
    examples = blocks(language)
    assert examples
    for example in examples:
        file = tmp_path / f"example.{language}"
        file.write_text(example)
        check_document(read_document(str(file)))


def test_quotations_are_the_scripts_own_lines() -> None:
    """Each line that the demo's explanation quotes stands in the script, but for comments."""
    script = (ROOT / "zero_plugin/demo/train.py").read_text()
    script_lines = {line.partition("  #")[0].strip() for line in script.splitlines()}
    explanation = README.partition("## The demo, line by line")[2].partition("The weights load into the plain module")[
        0
    ]
    quoted = [line.strip() for block in blocks("python", explanation) for line in block.splitlines()]
    assert len(quoted) > 15
    assert [line for line in quoted if line not in script_lines] == []


def test_tree_lists_packages_and_top_modules_with_the_sentence_of_their_docstring() -> None:
    """The tree's lines are the first sentences of packages and top-level modules, none missing and none too many."""
    package = ROOT / "zero_plugin"
    files = {file.name: file for file in package.glob("[!_]*.py")}
    files |= {f"{file.parent.relative_to(package)}/": file for file in package.glob("*/**/__init__.py")}
    wanted = {_line(name, file) for name, file in files.items() if "schema" not in name and "rules" not in name}
    tree = README.partition("## The files")[2].partition("\nzero_plugin/")[2].partition("```")[0]
    listed = {" ".join(line.split()) for line in tree.splitlines() if line.strip()}
    assert {"missing": sorted(wanted - listed), "too many": sorted(listed - wanted)} == {
        "missing": [],
        "too many": [],
    }


def _line(name: str, file: Path) -> str:
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(f"{name} {docstring.splitlines()[0].rstrip('.')}".split())
